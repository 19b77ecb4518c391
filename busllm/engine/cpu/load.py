"""Loads a model for the compiled forward pass: packed weights from the cache, or made and put there.

Owns: the way from files to a `CpuDecoder` that is compiled and ready.
Does not know: whether this pass is the one to use (`engine/forward.py`), the runner.
Next on the path: `cpu_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from busllm.engine.cores import bind_threads
from busllm.engine.cpu import packed_file
from busllm.engine.cpu.cpu_decoder import CpuDecoder
from busllm.engine.cpu.one_sequence import logits_of
from busllm.engine.cpu.outliers import with_outliers
from busllm.engine.cpu.packed_model import PackedModel, Packer, Quantization, TensorSource
from busllm.engine.cpu.threads import num_threads, thread_ids
from busllm.engine.models.config import ModelConfig
from busllm.errors import ModelError
from busllm.telemetry.logging import get_logger

WORTH_KEEPING_BYTES = 16 * 2**20  # less is packed faster than it would be found


class TensorAccount(TensorSource, Protocol):
    """A checkpoint's tensors, with the account of what did not fit."""

    def finish(self) -> None:
        """Checks that everything was there, is finite, and was used.

        Raises:
            ModelError: names the tensors.
        """
        ...


@dataclass(frozen=True)
class Checkpoint:
    """Where weights come from.

    Attributes:
        open_tensors: opens them; not called when the packed form is in the cache.
        source: the file that they are in, or the first of several.
        fingerprint: asks for a digest of everything in the files.
    """

    open_tensors: Callable[[], TensorAccount]
    source: Path
    fingerprint: Callable[[], str]


def load_decoder(
    config: ModelConfig, checkpoint: Checkpoint, quantization: Quantization, *, binds_threads: bool = False
) -> CpuDecoder:
    """Makes a decoder whose first step is as fast as the others.

    Args:
        config: the model's shape.
        checkpoint: its weights.
        quantization: of the weights.
        binds_threads: gives each thread a core of its own, if `bind_threads` can.

    Raises:
        ModelError: the tensors do not match the configuration, cannot be decoded, changed while they were read, or give
            numbers that are not finite.
    """
    decoder = CpuDecoder(config, packed_weights(config, checkpoint, quantization))
    if not _gives_numbers(decoder):
        raise ModelError("The model computes numbers that are not finite. A value of config.json may be wrong.")
    if binds_threads:
        decoder.bound_threads = bind_threads(thread_ids(num_threads()))
    return decoder


def _gives_numbers(decoder: CpuDecoder) -> bool:
    """Computes a token as in steps of few rows and of many, which loads compiled code, or makes it."""
    usual, are_finite = decoder.least_shared_rows, True
    for least in (None,) if usual is None else (None, 1):
        decoder.least_shared_rows = least
        are_finite = are_finite and bool(logits_of(decoder, [0]).isfinite().all())
    decoder.least_shared_rows = usual
    return are_finite


def packed_weights(config: ModelConfig, checkpoint: Checkpoint, quantization: Quantization) -> PackedModel:
    """The packed form, from the cache or new; arguments as `load_decoder`."""
    fingerprint = checkpoint.fingerprint()
    path = packed_file.packed_path(checkpoint.source, fingerprint, quantization)
    packed = packed_file.load(path)
    if packed is not None:
        return packed
    tensors = checkpoint.open_tensors()
    packed = Packer(config, tensors, quantization).pack()
    tensors.finish()
    packed = with_outliers(config, packed)
    if checkpoint.fingerprint() != fingerprint:
        raise ModelError(f"{checkpoint.source} or a file beside it changed while it was read. Start again.")
    if packed.num_bytes < WORTH_KEEPING_BYTES:
        return packed
    try:
        packed_file.save(packed, path)
        packed_file.remove_stale(path)
    except OSError as error:
        # Without a cache every start packs again; the model is served all the same.
        get_logger("busllm.cpu").warning("packed_weights_not_kept", path=str(path), reason=str(error))
        return packed
    return packed_file.load(path) or packed
