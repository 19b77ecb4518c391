"""A model's shape, read from its `config.json`.

Owns: `ModelConfig`, which says everything that the decoder needs to know about an architecture, and the table of the
architectures that it covers.
Does not know: weights, tensors, where the file lies.
Next on the path: `engine/models/decoder.py`, which builds layers from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from busllm.engine.models.rope_config import RopeConfig, read_rope
from busllm.errors import ModelError
from busllm.model_store.config_values import ConfigValues

if TYPE_CHECKING:
    from busllm.engine.models.protocol import AttentionShape


_DEFAULT_WINDOW = 4096
MAX_LAYERS = 10_000  # more are a damaged file, and there is a window for each


class ExpertsConfig(msgspec.Struct, frozen=True):
    """A mixture of experts.

    Attributes:
        layers: indices of the layers that have it.
        num_experts, experts_per_token: how many there are, and how many of them a token goes through.
        intermediate_size: width of each expert.
        normalizes: the weights of a token's experts are scaled to sum to 1.
    """

    layers: frozenset[int]
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalizes: bool


class ModelConfig(msgspec.Struct, frozen=True):
    """What the decoder is built from.

    Attributes:
        architecture: as `config.json` names it.
        vocab_size: rows of the embedding and number of logits.
        hidden_size, intermediate_size: widths of the residual stream and of the feed-forward layer.
        num_layers, num_heads, num_kv_heads, head_dim: shape of attention; num_heads is a multiple of num_kv_heads.
        rms_norm_eps: added to the mean square.
        max_context_tokens: prompt and output together.
        rope: rotary position embedding.
        tie_word_embeddings: the embedding is the head.
        qkv_bias, output_bias, mlp_bias: which linears have a bias.
        qk_norm: queries and keys are normalised per head before they are rotated.
        layer_windows: per layer, how many positions (its own included) a token sees; None = all.
        experts: of the layers with a mixture of experts; None = every feed-forward layer is dense.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context_tokens: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    experts: ExpertsConfig | None = None

    @property
    def attention_shape(self) -> AttentionShape:
        """For the attention backend and its KV cache."""
        # Who only asks whether a model can be served does without torch.
        from busllm.engine.models.protocol import AttentionShape

        return AttentionShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            layer_windows=self.layer_windows,
        )


class _Traits(NamedTuple):
    """How one architecture differs from the plain decoder."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    windows: Callable[[Mapping[str, Any], int], tuple[int | None, ...]] = lambda raw, num_layers: (None,) * num_layers
    has_experts: bool = False


def _window(raw: Mapping[str, Any]) -> int | None:
    return ConfigValues({"sliding_window": _DEFAULT_WINDOW} | dict(raw)).whole_or_none("sliding_window")


def _mistral_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    return (_window(raw),) * num_layers


def _qwen_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    values = ConfigValues(raw)
    window = _window(raw) if values.flag("use_sliding_window") else None
    layer_types = values.texts_or_none("layer_types")
    if layer_types is None:
        first_windowed = values.whole("max_window_layers", default=28, at_least=0)
        return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _qwen_moe_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    return (_window(raw) if ConfigValues(raw).flag("use_sliding_window") else None,) * num_layers


def _llama(raw: Mapping[str, Any]) -> _Traits:
    bias = ConfigValues(raw).flag("attention_bias")
    return _Traits(qkv_bias=bias, output_bias=bias, mlp_bias=ConfigValues(raw).flag("mlp_bias"))


def _mistral(raw: Mapping[str, Any]) -> _Traits:
    return _Traits(windows=_mistral_windows)


def _qwen2(raw: Mapping[str, Any]) -> _Traits:
    return _Traits(qkv_bias=True, windows=_qwen_windows)


def _qwen3(raw: Mapping[str, Any]) -> _Traits:
    bias = ConfigValues(raw).flag("attention_bias")
    return _Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        default_head_dim=128,
        windows=_qwen_windows,
    )


def _qwen3_moe(raw: Mapping[str, Any]) -> _Traits:
    bias = ConfigValues(raw).flag("attention_bias")
    return _Traits(qkv_bias=bias, output_bias=bias, qk_norm=True, windows=_qwen_moe_windows, has_experts=True)


_ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any]], _Traits]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
SUPPORTED_ARCHITECTURES = tuple(_ARCHITECTURES)


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The architecture that a decoded `config.json` names.

    Raises:
        ModelError: it names none, or weights in a format that cannot be read.
    """
    names = ConfigValues(raw).texts_or_none("architectures")
    if not names:
        raise ModelError("config.json does not name an architecture (architectures).")
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"The weights are stored in the format {method!r}, which is not supported. "
            "Use the unquantized safetensors of the model, or a GGUF."
        )
    return names[0]


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoded `config.json`.

    Raises:
        ModelError: the architecture is not supported, a value is missing or impossible, or the file asks for something
            that the decoder does not do (another activation, part-rotated heads, a packed format inside safetensors).
    """
    architecture = architecture_of(raw)
    traits_of = _ARCHITECTURES.get(architecture)
    if traits_of is None:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{architecture} has no decoder of its own. These have: {known}.")
    _refuse_what_is_not_done(raw)
    traits, values = traits_of(raw), ConfigValues(raw)
    hidden_size, num_heads = values.whole("hidden_size"), values.whole("num_attention_heads")
    num_layers = values.whole("num_hidden_layers", at_most=MAX_LAYERS)
    num_kv_heads = values.whole_or_none("num_key_value_heads") or num_heads
    head_dim = values.whole_or_none("head_dim") or traits.default_head_dim or hidden_size // num_heads
    if not head_dim or head_dim % 2:
        raise ModelError(f"config.json has heads of {head_dim} numbers (head_dim); rotary pairs need an even count.")
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly.")
    windows = traits.windows(raw, num_layers)
    if len(windows) != num_layers:
        raise ModelError(f"config.json describes {len(windows)} layer_types for {num_layers} layers.")
    max_context_tokens = values.whole("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=values.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.real("rms_norm_eps", default=1e-6, may_be_zero=True),
        max_context_tokens=max_context_tokens,
        rope=read_rope(raw, head_dim, max_context_tokens),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        layer_windows=windows,
        experts=_experts(raw, num_layers) if traits.has_experts else None,
    )


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    values = ConfigValues(raw)
    key = "num_experts" if "num_experts" in raw else "num_local_experts"
    num_experts = values.whole(key, default=128, at_least=0)
    step, dense = values.whole("decoder_sparse_step", default=1), values.wholes("mlp_only_layers")
    layers = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not num_experts or not layers:
        return None
    experts_per_token = values.whole("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ModelError(f"config.json sends a token through {experts_per_token} of {num_experts} experts.")
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=values.whole("moe_intermediate_size"),
        normalizes=values.flag("norm_topk_prob"),
    )


def _refuse_what_is_not_done(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json asks for the activation {activation!r}; this decoder has silu.")
