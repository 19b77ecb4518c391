"""Text and token ids: the two changes of representation at both ends of the engine.

Owns: tokenizers, chat templates, incremental decoding and stop strings.
Does not know: the bus, requests, torch, `transformers` (whose import alone costs over a second).
Start reading at `tokenizer.py`; then `decoder.py`.
"""
