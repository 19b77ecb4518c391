"""The engine: sequences in, tokens out. Plain synchronous Python; it knows no bus and no event loop.

Two halves meet at `runner.py`: what is computed (`engine.py`, `planner.py`, `radix.py`, `pages.py`: no tensors), and
how (`model_runner.py`, `models/`, `attention/`, `sampler.py`: torch). In tests `null.py` takes the place of the second half.
"""
