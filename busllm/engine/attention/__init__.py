"""Attention backends: the seam (`protocol.py`), the reference (`torch_attention.py`), the look-up (`choose.py`).

A backend owns the KV cache's layout. Others plug in by the entry-point group `busllm.attention`.
"""
