"""Loads a model: files in, a runner out.

Owns: the choice of device and number format, the conversion of stored tensors, and the check that a checkpoint has
exactly what the configuration asks for.
Does not know: file formats (`model_store` hands out tensors by name), the order of operations (`models/decoder.py`).
Next on the path: `engine/model_runner.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from busllm.engine.attention.choose import AUTO, attention_factory, chosen_name
from busllm.engine.attention.protocol import AttentionFactory
from busllm.engine.cuda_graph import recorder_for
from busllm.engine.model_runner import ModelRunner
from busllm.engine.models.build import build_decoder
from busllm.engine.models.config import SUPPORTED_ARCHITECTURES, ModelConfig, architecture_of, read_config
from busllm.engine.models.protocol import CausalModel, CausalModelConfig
from busllm.engine.parallel.group import Group
from busllm.engine.runner import ModelInfo
from busllm.errors import ModelError
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.description import describe
from busllm.model_store.files import ModelFiles, read_json
from busllm.model_store.resolve import resolve
from busllm.model_store.tensor_part import WHOLE, TensorPart
from busllm.model_store.weights import WeightTensor, iter_tensors

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMED_AT_MOST = 5  # tensors that one message names


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded.

    Attributes:
        device: "cpu", "cuda", "cuda:1", …; "auto" = CUDA where there is one.
        dtype: "float32", "bfloat16" or "float16"; "auto" = float32 on CPU, bfloat16 on CUDA.
        attention: "torch", "flashinfer" or an installed plug-in; "auto" = FlashInfer on CUDA where it can serve the
            model, else torch.
    """

    device: str = AUTO
    dtype: str = AUTO
    attention: str = AUTO


def load_runner(
    source: str | ModelFiles,
    config: LoadConfig | None = None,
    group: Group | None = None,
    grammars: GrammarCompiler | None = None,
) -> ModelRunner:
    """Loads a model, or one rank's part of it.

    Args:
        source: what `model_store.resolve` takes, or files that it found.
        config: how; None = every default.
        group: the ranks that the model is split among; need not be connected yet. None = it is not split.
        grammars: of the model; None = no request will have one.

    Raises:
        ModelError: the files are missing or damaged, the architecture is not supported, tensors are missing, unknown
            or of another shape, or the device or dtype cannot be used.
        MissingPackage: the attention backend is not installed.
    """
    config = config or LoadConfig()
    files = resolve(source) if isinstance(source, str) else source
    if files.config is None:
        raise ModelError(f"The model {files.name!r} has no config.json, so its architecture is unknown.")
    factory = attention_factory(config.attention)
    raw = read_json(files.config)
    device = _choose_device(config.device)
    dtype = _choose_dtype(config.dtype, device)
    decoder: CausalModel
    if architecture_of(raw) in SUPPORTED_ARCHITECTURES:
        decoder = _own_decoder(files, read_config(raw), group, device, dtype)
    else:
        decoder = _hooked_model(files, raw, group, factory, device, dtype)
    info = _model_info(files, decoder.config, dtype, _attention_name(config.attention, decoder.config, device, dtype))
    return ModelRunner(
        decoder,
        info,
        device=device,
        dtype=dtype,
        attention=factory,
        group=group,
        grammars=grammars,
        recorder=recorder_for(decoder.config, device, num_ranks=1 if group is None else group.shard.num_ranks),
    )


def _own_decoder(
    files: ModelFiles, shape: ModelConfig, group: Group | None, device: torch.device, dtype: torch.dtype
) -> CausalModel:
    reader = TensorReader(dict(iter_tensors(files)), device, dtype)
    decoder = build_decoder(shape, reader, group)
    reader.finish(ignored=("lm_head.weight",) if shape.tie_word_embeddings else ())
    return decoder


def _hooked_model(
    files: ModelFiles,
    raw: Mapping[str, Any],
    group: Group | None,
    factory: AttentionFactory,
    device: torch.device,
    dtype: torch.dtype,
) -> CausalModel:
    if group is not None and group.shard.num_ranks > 1:
        raise ModelError(f"{architecture_of(raw)} runs inside transformers and cannot be split among ranks.")
    if files.directory is None or not files.safetensors:
        raise ModelError(f"{architecture_of(raw)} can be loaded from safetensors only.")
    # The modelling code of transformers is imported for architectures that have no decoder of their own here.
    from busllm.engine.models.hooked.load import HookedSettings, load_hooked

    max_context_tokens = describe(files).max_context_tokens
    return load_hooked(files.directory, raw, HookedSettings(factory, max_context_tokens, device, dtype))


class TensorReader:
    """Hands out stored tensors and keeps account of what did not fit, so that one error names all of it."""

    def __init__(self, tensors: Mapping[str, WeightTensor], device: torch.device, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    @property
    def device(self) -> torch.device:
        """Where tensors are put."""
        return self._device

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart = WHOLE) -> torch.Tensor:
        """Reads one tensor, or a part of it.

        Args:
            shape: of the whole tensor.

        Returns:
            The values in the reader's dtype on its device. Zeros when the tensor is missing or has another shape:
            `finish` raises then.
        """
        tensor = self._tensors.get(name)
        self._taken.add(name)
        if tensor is None:
            self._missing.append(name)
        elif tuple(tensor.shape) != shape:
            self._misshapen.append(f"{name} is {_format(tensor.shape)} and should be {_format(shape)}")
        else:
            return torch.tensor(tensor.to_float32(part)).to(self._device, self._dtype)
        return torch.zeros(part.shape_of(shape), dtype=self._dtype, device=self._device)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Checks that everything was there and everything was used.

        Args:
            ignored: tensors that may be left over.

        Raises:
            ModelError: names the tensors.
        """
        left_over = [
            name
            for name in self._tensors
            if name not in self._taken and name not in ignored and not name.endswith("rotary_emb.inv_freq")
        ]
        problems = [
            f"{verb} {_listed(names)}"
            for verb, names in (("missing:", self._missing), ("wrong shape:", self._misshapen), ("unknown:", left_over))
            if names
        ]
        if problems:
            raise ModelError(f"The weights do not match config.json. {'; '.join(problems)}.")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _choose_device(name: str) -> torch.device:
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"{name!r} is not a device. Use auto, cpu or cuda.", param="device") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"The device {name!r} is not supported. Use auto, cpu or cuda.", param="device")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("The device 'cuda' was asked for, but torch finds no CUDA device here.", param="device")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # of this thread: streams, events and libraries go by it
    return device


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ModelError(f"The dtype {name!r} is not supported. Use auto, {', '.join(_DTYPES)}.", param="dtype")
    return _DTYPES[name]


def _attention_name(name: str, config: CausalModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    shape = config.attention_shape
    has_sinks = shape.layer_sinks is not None
    return chosen_name(name, head_dim=shape.head_dim, dtype=dtype, device=device, has_sinks=has_sinks)[0]


def _model_info(files: ModelFiles, config: CausalModelConfig, dtype: torch.dtype, attention: str) -> ModelInfo:
    description, shape = describe(files), config.attention_shape
    return ModelInfo(
        name=config.architecture,
        vocab_size=config.vocab_size,
        max_context_tokens=description.max_context_tokens,
        eos_token_ids=description.eos_token_ids,
        kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize,
        fingerprint=hashlib.sha256(f"{description.fingerprint} {dtype}".encode()).hexdigest()[:32],
        attention=attention,
    )
