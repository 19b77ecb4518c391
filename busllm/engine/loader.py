"""Loads a model: files in, a runner out.

Owns: the choice of device and number format, and what is made for each forward pass.
Does not know: file formats (`model_store` hands out tensors by name), the order of operations (`models/decoder.py`).
Next on the path: `engine/model_runner.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from busllm.engine.attention.choose import AUTO, attention_factory, chosen_name
from busllm.engine.attention.protocol import AttentionFactory
from busllm.engine.cuda_graph import recorder_for
from busllm.engine.first_step import check_first_step
from busllm.engine.foresight import Foreseen, foresee, own_shape
from busllm.engine.forward_choice import ForwardPass, ForwardWish, Quantization, choose_forward
from busllm.engine.model_runner import ModelRunner
from busllm.engine.models.build import build_decoder
from busllm.engine.models.config import ModelConfig
from busllm.engine.models.protocol import CausalModel, CausalModelConfig
from busllm.engine.parallel.group import Group
from busllm.engine.runner import ModelInfo
from busllm.engine.tensor_reader import TensorAccount, TensorReader
from busllm.errors import ModelError
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.description import describe
from busllm.model_store.files import ModelFiles, read_json
from busllm.model_store.resolve import resolve
from busllm.model_store.weights import iter_tensors, most_common_format
from busllm.telemetry.logging import get_logger

Progress = Callable[[str], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded.

    Attributes:
        device: "cpu", "cuda", "cuda:1", …; "auto" = CUDA where there is one.
        dtype: of weights, numbers and cache in the torch modules: "float32", "bfloat16" or "float16"; any of them rules
            the compiled pass out. "auto" = bfloat16 on CUDA, and on a CPU the compiled pass (`quantization` says what
            its weights are; sums in float32, a cache in bfloat16) where it serves the model, else float32.
        attention: "torch", "cpu" (the compiled forward pass), "flashinfer" or an installed plug-in; "auto" = FlashInfer
            on CUDA, and on a CPU the compiled pass for weights that it keeps as they are stored, which float32 and
            float16 are not; torch where these cannot serve the model.
        quantization: of the weights; "auto" = the file's own. "none" (bfloat16), "int8" and "int4" ask for the compiled
            pass; of these "none" is taken by torch too, which expands the weights to `dtype`.
        page_tokens: tokens per KV page that the engine will have; None = its default. Not all fit every forward pass.
        binds_threads: gives each thread of the compiled pass a core of its own where it can (`engine/cores.py`). For a
            server's thread that loads and computes; in a program of somebody else it would bind theirs.
    """

    device: str = AUTO
    dtype: str = AUTO
    attention: str = AUTO
    quantization: Quantization = "auto"
    page_tokens: int | None = None
    binds_threads: bool = False


def load_runner(
    source: str | ModelFiles,
    config: LoadConfig | None = None,
    group: Group | None = None,
    grammars: GrammarCompiler | None = None,
    progress: Progress | None = None,
) -> ModelRunner:
    """Loads a model, or one rank's part of it.

    Args:
        source: what `model_store.resolve` takes, or files that it found.
        config: how; None = every default.
        group: the ranks that the model is split among; need not be connected yet. None = it is not split.
        grammars: of the model; None = no request will have one.
        progress: told what takes long.

    Raises:
        ModelError: the files are missing or damaged, the architecture is not supported, tensors are missing, unknown
            or of another shape, the model computes numbers that are not finite, or the device or dtype cannot be used.
        MissingPackage: the attention backend is not installed.
        ConfigError: quantised weights are asked for where they cannot be had, or pages that the forward pass that is
            asked for cannot have.
    """
    config = config or LoadConfig()
    files = resolve(source) if isinstance(source, str) else source
    device = choose_device(config.device)
    foreseen = foresee(files, _wish(files, config, device, group))
    if foreseen.shape is not None and foreseen.forward is ForwardPass.COMPILED:
        runner = _compiled_runner(files, foreseen.shape, config, grammars, progress)
    else:
        runner = _torch_runner(files, foreseen, config, device, group, grammars)
        if group is None:  # ranks are not connected yet
            check_first_step(runner)
    log = get_logger("busllm.engine").bind(model=runner.model.name, attention=runner.model.attention)
    why = {} if foreseen.why_not_compiled is None else {"not_compiled_because": foreseen.why_not_compiled}
    log.info("loaded", device=str(device), **why)
    return runner


def _torch_runner(
    files: ModelFiles,
    foreseen: Foreseen,
    config: LoadConfig,
    device: torch.device,
    group: Group | None,
    grammars: GrammarCompiler | None,
) -> ModelRunner:
    shape = foreseen.shape
    factory = attention_factory(config.attention)
    dtype = _choose_dtype(config.dtype, device)
    decoder: CausalModel
    if shape is not None:
        decoder = _own_decoder(files, shape, group, device, dtype)
    else:
        decoder = _hooked_model(files, foreseen.raw, factory, device, dtype)
    name = _attention_name(config.attention, decoder.config, device, dtype)
    info = _model_info(files, decoder.config, dtype, name, str(dtype))
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


def prepare_model(files: ModelFiles) -> bool:
    """Does once what the first start would do: packs weights and compiles kernels, into the cache.

    Args:
        files: of a model that is here.

    Returns:
        Whether there was anything to do: the compiled forward pass will serve the model on this machine.

    Raises:
        ModelError: the weights are damaged or do not match the configuration.
    """
    shape = own_shape(read_json(files.config)) if files.config is not None else None
    wish = _wish(files, LoadConfig(), choose_device(AUTO), None)
    if shape is None or choose_forward(wish, shape) is ForwardPass.TORCH:
        return False
    _compiled_runner(files, shape, LoadConfig(), None, None).close()
    return True


def _own_decoder(
    files: ModelFiles, shape: ModelConfig, group: Group | None, device: torch.device, dtype: torch.dtype
) -> CausalModel:
    account = TensorAccount(dict(iter_tensors(files)))
    decoder = build_decoder(shape, TensorReader(account, device, dtype), group)
    account.finish()
    return decoder


def _compiled_runner(
    files: ModelFiles,
    shape: ModelConfig,
    config: LoadConfig,
    grammars: GrammarCompiler | None,
    progress: Progress | None,
) -> ModelRunner:
    # The compiler takes half a second to import, and where kernels are kept must be known before they are.
    from busllm.engine.cpu.kernels import are_compiled, prepare_kernels

    folder = prepare_kernels()
    if not are_compiled(folder):
        get_logger("busllm.engine").info("compiling_kernels", folder=str(folder), why="once per CPU and version")
        if progress is not None:
            progress("compiling kernels, once for this CPU and version")
    from busllm.engine.cpu.cpu_attention import CpuAttention, bytes_per_position
    from busllm.engine.cpu.load import Checkpoint, load_decoder

    def account() -> TensorAccount:
        return TensorAccount(dict(iter_tensors(files)))

    checkpoint = Checkpoint(account, files.weights[0], lambda: describe(files).fingerprint)
    decoder = load_decoder(shape, checkpoint, config.quantization, binds_threads=config.binds_threads)
    dtype = torch.bfloat16  # of the cache
    info = msgspec.structs.replace(
        _model_info(files, shape, dtype, f"cpu ({decoder.label})", decoder.number_format),
        kv_bytes_per_token=shape.num_layers * bytes_per_position(shape.num_kv_heads, shape.head_dim),
        mapped_bytes=decoder.num_bytes,
    )
    return ModelRunner(
        decoder, info, device=torch.device("cpu"), dtype=dtype, attention=CpuAttention, grammars=grammars
    )


def _hooked_model(
    files: ModelFiles,
    raw: Mapping[str, Any],
    factory: AttentionFactory,
    device: torch.device,
    dtype: torch.dtype,
) -> CausalModel:
    assert files.directory is not None, "the null model has no weights to load"
    # The modelling code of transformers is imported for architectures that have no decoder of their own here.
    from busllm.engine.models.hooked.load import HookedSettings, load_hooked

    max_context_tokens = describe(files).max_context_tokens
    return load_hooked(files.directory, raw, HookedSettings(factory, max_context_tokens, device, dtype))


def _wish(files: ModelFiles, config: LoadConfig, device: torch.device, group: Group | None) -> ForwardWish:
    return ForwardWish(
        attention=config.attention,
        quantization=config.quantization,
        dtype=config.dtype,
        device=device.type,
        num_ranks=1 if group is None else group.shard.num_ranks,
        page_tokens=config.page_tokens,
        weights=most_common_format(files),
    )


def choose_device(name: str) -> torch.device:
    """The device that a name means on this machine, made the current one of this thread.

    Args:
        name: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1", …

    Raises:
        ModelError: there is none of that name.
    """
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


def _model_info(
    files: ModelFiles, config: CausalModelConfig, dtype: torch.dtype, attention: str, number_format: str
) -> ModelInfo:
    description, shape = describe(files), config.attention_shape
    return ModelInfo(
        name=config.architecture,
        vocab_size=config.vocab_size,
        max_context_tokens=description.max_context_tokens,
        eos_token_ids=description.eos_token_ids,
        kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize,
        fingerprint=hashlib.sha256(f"{description.fingerprint} {number_format}".encode()).hexdigest()[:32],
        attention=attention,
    )
