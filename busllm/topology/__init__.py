"""Where the stages of a cluster run: the topology file, the placement, and the processes of one host.

Owns: the TOML as frozen Structs (`config`), reading it with errors that name key and line (`read`), what is impossible
(`checks`), which process holds which stages (`placement`), and `busllm up`, the parent of this host's processes
(`up`, `supervise`).
Does not know: what a stage does; stages are started by command line.
Next on the path: `cli/up.py` calls in here, `cli/stage.py` is what gets spawned.
"""
