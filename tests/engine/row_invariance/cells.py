"""What computes the rows: each family and file format, in each forward pass and number format that it has.

Owns: the table of cells, and which of them are in the default suite; each of the others differs from one of these in a
single respect.
Does not know: what is asked of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gguf.constants import GGMLQuantizationType

from busllm.engine.cpu.instructions import detect_instructions
from busllm.engine.loader import LoadConfig
from busllm.errors import ModelError
from busllm.model_store.files import ModelFiles
from busllm.model_store.resolve import resolve
from busllm.testing.tiny_gguf import write_tiny_gguf
from busllm.testing.tiny_model import write_tiny_model

DEFAULT_MODEL = "smollm2-135m"

FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama3-rope", {}),
    "yarn-rope": ("yarn-rope", {}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "biases, heads of 20": ("llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
}
WITHOUT_COMPILED_PASS: Mapping[str, tuple[str, dict[str, Any]]] = {
    # Inside transformers:
    "gpt2": ("gpt2", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {}),
}
_WHOLE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
}
BLOCK_FORMATS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
_FAST = {
    *(("float32", model) for model in ("mistral", "qwen3", "biases, heads of 20", "gpt2", "mixtral")),
    ("bfloat16", "phi3"),
}
_DTYPES = ("float32", "bfloat16", "float16")
_QUANTIZATIONS = ("none", "int8", "int4")


class Cell(NamedTuple):
    """One model in one number format.

    Attributes:
        model: a name of the tables above, a block format of GGUF, or the default model.
        number_format: a dtype of the torch pass, a quantization of the compiled one, or "auto" of the latter.
    """

    model: str
    number_format: str

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled pass computes it."""
        return self.number_format not in _DTYPES

    @property
    def load_config(self) -> LoadConfig:
        """How it is loaded."""
        if self.is_compiled:
            return LoadConfig(device="cpu", attention="cpu", quantization=self.number_format)  # type: ignore[arg-type]
        return LoadConfig(device="cpu", attention="torch", dtype=self.number_format)

    @property
    def name(self) -> str:
        """Of the test."""
        return f"{self.model}-{'compiled' if self.is_compiled else 'torch'}-{self.number_format}"

    def files(self, folder: Path) -> ModelFiles:
        """The model's files, written where it is a tiny one."""
        if self.model == DEFAULT_MODEL:
            try:
                return resolve(DEFAULT_MODEL)
            except ModelError as error:
                pytest.skip(error.message)
        if self.model in BLOCK_FORMATS:
            whole = write_tiny_model(folder / "whole", "llama", **_WHOLE_BLOCKS)
            path = write_tiny_gguf(whole, folder / "model.gguf", GGMLQuantizationType[self.model])
            return resolve(str(path))
        architecture, overrides = {**FAMILIES, **WITHOUT_COMPILED_PASS}[self.model]
        return resolve(str(write_tiny_model(folder / "model", architecture, **overrides)))


def _all_cells() -> list[Cell]:
    return [
        *(Cell(family, dtype) for family in (*FAMILIES, *WITHOUT_COMPILED_PASS) for dtype in _DTYPES),
        *(Cell(family, quantization) for family in FAMILIES for quantization in _QUANTIZATIONS),
        *(Cell(block_format, "auto") for block_format in BLOCK_FORMATS),
        *(Cell(DEFAULT_MODEL, number_format) for number_format in ("auto", *_QUANTIZATIONS, "float32", "bfloat16")),
    ]


def _is_fast(cell: Cell) -> bool:
    if cell.model in BLOCK_FORMATS:
        return cell.model in ("Q4_0", "Q4_1", "Q8_0")  # whose blocks the compiled pass computes as they are
    if cell.model == DEFAULT_MODEL:
        return cell.number_format == "auto"
    if cell.is_compiled:
        return True
    # Of the torch pass what differs in more than the table of rotations, which the compiled pass shows at less cost.
    return cell.model in ("llama", "qwen3-moe") or (cell.number_format, cell.model) in _FAST


def _parameter(cell: Cell) -> Any:
    marks = [pytest.mark.timeout(900)]  # the first of a process may have to compile
    if not _is_fast(cell):
        marks.append(pytest.mark.slow)
    if cell.is_compiled and detect_instructions() is None:
        marks.append(pytest.mark.skip(reason="this CPU lacks the instructions of the compiled kernels"))
    return pytest.param(cell, marks=marks, id=cell.name)


CELLS = [_parameter(cell) for cell in _all_cells()]
