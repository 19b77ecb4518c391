"""The small files beside a GGUF: written once, so that later starts read kilobytes and not a whole vocabulary.

Owns: which files are derived and that they appear whole or not at all.
Does not know: how their content is made (`gguf_config.py`, `gguf_tokenizer.py`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from busllm.model_store.files import CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG
from busllm.model_store.gguf_config import generation_config, model_config
from busllm.model_store.gguf_file import GgufFile
from busllm.model_store.gguf_tokenizer import tokenizer_config, tokenizer_json


def derive_small_files(gguf: Path, folder: Path) -> None:
    """Writes config, generation config, tokenizer, its config and the chat template of a GGUF file.

    The folder can be loaded by `transformers`. `config.json` is written last: where it stands, the others do.

    Args:
        gguf: the weights.
        folder: an existing folder.

    Raises:
        ModelError: the file cannot be read, or its architecture or vocabulary is not known.
    """
    with GgufFile(gguf) as file:
        config = model_config(file)
        _write(folder / TOKENIZER, _json(tokenizer_json(file), indent=None))
        _write(folder / TOKENIZER_CONFIG, _json(tokenizer_config(file, config["max_position_embeddings"])))
        if template := file.metadata.get("tokenizer.chat_template"):
            _write(folder / CHAT_TEMPLATE, template)
        _write(folder / GENERATION_CONFIG, _json(generation_config(file)))
        _write(folder / CONFIG, _json(config))


def _json(value: dict[str, Any], indent: int | None = 2) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"


def _write(path: Path, text: str) -> None:
    # Replaced by rename: a reader in another process sees the old file or the whole new one.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
