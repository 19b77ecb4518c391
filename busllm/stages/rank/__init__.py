"""The ranks behind the first: `stage.py` follows rank 0 over the bus, `rank_thread.py` computes beside it, and
`build_part.py` loads this rank's part of the model."""
