"""One model on several devices: what each rank holds, how ranks add up their parts, and how they step together.

`shard.py` says which part a rank has, `group.py` what ranks can do together and `torch_group.py` does it,
`layers.py` are the layers that need the others, `runner.py` is rank 0's runner and `worker.py` that of the others."""
