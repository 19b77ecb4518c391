"""A model of `transformers` behind the runner's protocol: ragged rows as one flat sequence, attention over our pages.

Owns: the split of the model into its body (all layers) and its head, and the answer to each layer's attention.
Does not know: how the model was loaded, whether it is right (`self_test.py` found out before).
Next on the path: `engine/attention/`, and `engine/sampler.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from busllm.engine.attention.protocol import Attention
from busllm.engine.models.hooked.hook import AttentionCall, AttentionHook
from busllm.engine.models.hooked.row_products import RowProducts
from busllm.engine.models.hooked.survey import Survey, survey
from busllm.engine.models.protocol import AttentionShape
from busllm.engine.row_scans import RowScans, TorchScans
from busllm.errors import EngineError, ModelError


class HookedConfig(msgspec.Struct, frozen=True):
    """Implements `CausalModelConfig`."""

    architecture: str
    vocab_size: int
    attention_shape: AttentionShape


class _Step(NamedTuple):
    """What the layers need while a step runs."""

    cache_slots: torch.Tensor
    attention: Attention


class HookedModel:
    """Implements `CausalModel`."""

    def __init__(self, model: PreTrainedModel, hook: AttentionHook) -> None:
        """Splits the model and surveys it; afterwards only this object can use it.

        Raises:
            ModelError: the model cannot be served; the message is a clause about it.
        """
        self._text = model.config.get_text_config()
        self._body, self._head = _split(model)
        self._device = model.device
        self._hook = hook
        self._step: _Step | None = None
        self._rows: AbstractContextManager[object] = RowProducts() if self._device.type == "cpu" else nullcontext()
        self._survey = self._look()
        self.config = HookedConfig(type(model).__name__, self._text.vocab_size, self._survey.shape)

    def survey_anew(self) -> None:
        """Learns what the layers ask for once more: the configuration has changed.

        Raises:
            ModelError: the model cannot be served; the message is a clause about it.
        """
        self._survey = self._look()
        self.config = msgspec.structs.replace(self.config, attention_shape=self._survey.shape)

    @torch.inference_mode()
    def _look(self) -> Survey:
        seen = survey(self._text, self._hook, self._run)
        self._hook.use(self._attend)
        return seen

    @property
    def is_recordable(self) -> bool:
        """Never: the model's code may read whatever it likes."""
        return False

    @property
    def row_scans(self) -> RowScans:
        """By torch."""
        return TorchScans()

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache_slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """Runs all layers over a step's tokens: (num_tokens, hidden_size)."""
        self._step = _Step(cache_slots, attention)
        try:
            return self._run(token_ids, positions)
        finally:
            self._step = None

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) → float32 (num_rows, vocab_size)."""
        with self._rows:
            logits: torch.Tensor = self._head(inputs_embeds=states[None], use_cache=False).logits
        return logits[0].float()

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with self._rows:
            out = self._body(
                input_ids=token_ids[None].to(self._device),
                position_ids=positions[None].to(self._device),
                use_cache=False,
            )
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        step, layer, shape = self._step, self._survey.layers[call.module], self._survey.shape
        if step is None:
            raise EngineError("a layer called its attention outside of a step")
        if call.window != shape.layer_windows[layer] or call.soft_cap != shape.soft_cap:
            raise EngineError(f"layer {layer} asks for another attention than when the model was loaded")
        dtype, value_dim = step.attention.cache.shape.dtype, call.values.shape[-1]
        keys, values = (_widen(states, shape.head_dim).to(dtype) for states in (call.keys, call.values))
        step.attention.cache.store(layer, keys, values, step.cache_slots)
        # A backend has one scale for all layers. Zeros beyond the head's own width leave each score as it is.
        queries = call.queries if call.scale == shape.scale else call.queries * (call.scale / shape.scale)
        attended = step.attention.attend(layer, _widen(queries, shape.head_dim).to(dtype))
        return attended[..., :value_dim].to(call.queries.dtype)


class _Output(BaseModelOutputWithPast):
    """The body's output: hidden states, and nothing of what else a head may hand on to its caller."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(torch.nn.Module):
    """Stands in the body's place, so that the model's own forward pass is its head alone.

    What comes after the layers differs from model to model (a projection, a bias, a soft cap, a scale); it stays so.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def body_of(model: PreTrainedModel) -> torch.nn.Module:
    """All layers of a causal model, without its head; the model itself when they cannot be told apart."""
    body: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return getattr(model, "model", model) if body is model else body


def _split(model: PreTrainedModel) -> tuple[torch.nn.Module, PreTrainedModel]:
    body = body_of(model)
    path = next((name for name, module in model.named_modules() if module is body), "")
    if not path:
        raise ModelError("its layers cannot be told from its head")
    model.set_submodule(path, _Given(body.config))
    return body, model


def _widen(states: torch.Tensor, size: int) -> torch.Tensor:
    """Pads heads with zeros to the width of the KV cache, contiguous."""
    missing = size - states.shape[-1]
    return functional.pad(states, (0, missing)) if missing else states.contiguous()
