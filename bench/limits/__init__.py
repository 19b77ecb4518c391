"""How near the machine's limits a step of the compiled forward pass is. `python -m bench.limits`.

The path: `__main__.py` (flags, the table) → `work.py` (what a step has to read and multiply) and `peaks.py` (what the
cores can) → `bench/cpu_forward.py` (how long the step takes).
"""
