"""The engine: sequences in, tokens out. Plain synchronous Python; it knows no bus and no event loop.

Two halves meet at `runner.py`:
what is computed, without tensors: `engine.py`, `planner.py`, `radix.py`, `pages.py`;
and how, in torch: `model_runner.py`, `models/`, `attention/`, `sampler.py`. In tests `null.py` takes this one's place.
"""
