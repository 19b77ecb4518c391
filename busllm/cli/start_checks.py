"""What a start would refuse, as far as it can be told without weights: the same questions, answered in the same words.

Owns: which of a start's questions can be put on this host, and to which key of the file an answer belongs.
Does not know: the answers (`engine/foresight.py`, `model_store/description.py`, `registry.py`).
"""

from __future__ import annotations

from busllm.engine.config import BUILT_IN_ATTENTIONS
from busllm.engine.foresight import foresee
from busllm.engine.forward_choice import AUTO, CPU, ForwardWish
from busllm.errors import ConfigError, MissingPackage
from busllm.model_store.description import check_small_files
from busllm.model_store.files import ModelFiles
from busllm.registry import require_plugin
from busllm.topology.config import Topology
from busllm.topology.model_fit import check_heads


def check_attention(topology: Topology) -> None:
    """Checks that the attention backend is installed on this host, where a scheduler is to run.

    Raises:
        ConfigError: it is not.
    """
    name = topology.scheduler.attention
    try:
        require_plugin("busllm.attention", name, built_in=BUILT_IN_ATTENTIONS)
        if name == "flashinfer":
            from busllm.engine.attention.flashinfer_library import load_flashinfer  # imports torch

            load_flashinfer()
    except MissingPackage as error:
        raise ConfigError(error.message, key="scheduler.attention") from error


def check_model(topology: Topology, files: ModelFiles, *, computes_here: bool) -> None:
    """Checks that a model whose files are here can be served in the way that the topology asks for.

    Args:
        topology: checked, but for its model.
        files: of the model.
        computes_here: whether a scheduler is to run on this host, whose devices then count.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: a setting cannot work with it.
    """
    check_small_files(files)
    if files.is_null:
        return
    check_heads(files, topology)
    foreseen = foresee(files, _wish(topology, computes_here))
    if foreseen.shape is None and files.directory is not None:
        from busllm.engine.models.hooked.load import refuse_before_weights  # imports transformers

        refuse_before_weights(files.directory, foreseen.raw)


def _wish(topology: Topology, computes_here: bool) -> ForwardWish:
    model, scheduler = topology.model, topology.scheduler
    return ForwardWish(
        attention=scheduler.attention,
        quantization=model.quantization,
        dtype=model.dtype,
        device=_device_type(topology, computes_here),
        num_ranks=scheduler.tensor_parallel,
        page_tokens=None if scheduler.page_tokens == "auto" else scheduler.page_tokens,
    )


def _device_type(topology: Topology, computes_here: bool) -> str:
    """Of the device that a start would take; where another host takes it, the one that refuses least."""
    scheduler = topology.scheduler
    depends = scheduler.attention == CPU or topology.model.quantization in ("int8", "int4") or scheduler.device != AUTO
    if not computes_here or not depends:
        return "cpu"
    from busllm.engine.loader import choose_device  # imports torch

    return choose_device(scheduler.device).type
