"""Models on disk: finding, fetching and describing their files.

Owns: the cache folder, aliases, `pull`, reading GGUF and safetensors, and what the small files beside the weights say.
Does not know: torch, the bus, how text becomes ids (`busllm/text`) or weights become layers (`busllm/engine`).
Start reading at `resolve.py` (a model's name → its files); then `pull.py`, `description.py`, `weights.py`.
"""
