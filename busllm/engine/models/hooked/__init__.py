"""Any other causal model of `transformers`, with its attention replaced by ours.

`load.py` reads the checkpoint, `hook.py` stands in for the model's attention, `survey.py` learns what the layers ask of
it, `hooked_model.py` serves, `self_test.py` compares with the model's own attention before the first request. Nothing
here is imported for the architectures that `models/config.py` covers.
"""
