"""Whether the model's shape and the topology go together, and how large the KV cache becomes.

Owns: heads and ranks, KV bytes per token, from the model's `config.json` alone.
Does not know: weights, devices; the engine measures what is really free.
"""

from __future__ import annotations

import msgspec

from busllm.errors import ConfigError
from busllm.model_store.config_values import ConfigValues
from busllm.model_store.description import text_config
from busllm.model_store.files import ModelFiles, read_json
from busllm.topology.config import DEFAULT_KV_TOKENS, SchedulerConfig, Topology
from busllm.topology.sizes import memory_text, parse_memory

BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}


class AttentionShape(msgspec.Struct, frozen=True):
    """Shape of a model's attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_NUMBER[dtype]


def attention_shape(files: ModelFiles) -> AttentionShape | None:
    """Reads the shape; None = the model has no configuration, or not one with attention heads.

    Raises:
        ModelError: the configuration cannot be read.
    """
    if files.config is None:
        return None
    config = text_config(read_json(files.config))
    values = ConfigValues(config, str(files.config))
    num_heads, num_layers = values.whole_or_none("num_attention_heads"), values.whole_or_none("num_hidden_layers")
    hidden_size = values.whole_or_none("hidden_size")
    if num_heads is None or num_layers is None or hidden_size is None:
        return None
    return AttentionShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.whole_or_none("num_key_value_heads") or num_heads,
        head_dim=values.whole_or_none("head_dim") or hidden_size // num_heads,
    )


def check_heads(files: ModelFiles, topology: Topology) -> None:
    """Checks that a model's heads can be shared out to the ranks; a model without heads is no concern of this check.

    Raises:
        ConfigError: they cannot.
        ModelError: the configuration cannot be read.
    """
    if topology.scheduler.tensor_parallel > 1:
        shape = attention_shape(files)
        if shape is not None:
            check_ranks(shape, topology.scheduler.tensor_parallel)


def check_ranks(shape: AttentionShape, num_ranks: int) -> None:
    """Checks that the heads can be shared out.

    Raises:
        ConfigError: heads are no multiple of ranks, or KV heads can neither be split nor repeated evenly.
    """
    allowed = [ranks for ranks in range(1, shape.num_heads + 1) if _ranks_fit(shape, ranks)]
    if num_ranks not in allowed:
        raise ConfigError(
            f"is {num_ranks}, but the model has {shape.num_heads} heads and {shape.num_kv_heads} KV heads; "
            f"possible are {', '.join(map(str, allowed))}.",
            key="scheduler.tensor_parallel",
        )


def _ranks_fit(shape: AttentionShape, num_ranks: int) -> bool:
    kv_heads = shape.num_kv_heads
    return shape.num_heads % num_ranks == 0 and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0)


def kv_size_text(scheduler: SchedulerConfig, shape: AttentionShape | None, dtype: str) -> str:
    """The size of the KV cache of one replica, for people.

    Args:
        shape: None = not known (the null model, or the model is not here).
        dtype: as in the topology file.
    """
    if isinstance(scheduler.kv_memory, float):
        return f"{scheduler.kv_memory:.0%} of the free memory"
    dtypes = ["bfloat16", "float32"] if dtype == "auto" else [dtype]
    if isinstance(scheduler.kv_memory, str):
        num_bytes = parse_memory(scheduler.kv_memory) or 0
        if shape is None:
            return memory_text(num_bytes)
        tokens = [f"{num_bytes // shape.kv_bytes_per_token(name):,} tokens in {name}" for name in dtypes]
        return f"{memory_text(num_bytes)} ({', '.join(tokens)})"
    num_tokens = scheduler.kv_tokens or DEFAULT_KV_TOKENS
    if shape is None:
        return f"{num_tokens:,} tokens"
    sizes = [f"{memory_text(num_tokens * shape.kv_bytes_per_token(name))} in {name}" for name in dtypes]
    return f"{num_tokens:,} tokens ({', '.join(sizes)})"
