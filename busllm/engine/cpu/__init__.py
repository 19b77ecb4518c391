"""The fast forward pass for CPUs: numba compiles a step into a few calls that hold no GIL.

`instructions.py` says what the CPU can do, `vectors.py` and `tiles.py` write LLVM for it, `inputs.py`, `linear.py`,
`elementwise.py`, `attention.py` and `experts.py` are the parts of a layer, `step.py` puts them in order; `pack.py` lays
weights out for them and `packed_file.py` keeps the result on disk; `cpu_attention.py` owns the KV layout and
`cpu_decoder.py` is the seam.

The torch modules (`engine/models/decoder.py`) remain the readable reference: both compute the same model.
"""
