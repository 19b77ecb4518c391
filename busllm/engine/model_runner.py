"""The forward pass in torch: executes step plans on CPU or CUDA.

Owns: the device side of a step, from the plan to the sampled tokens: page tables, slots, the decoder, the sampler.
Does not know: requests, why a row was chosen, which pages are free, where weights come from (`engine/loader.py`).
Next on the path: `engine/engine.py`, which collects the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from busllm.engine.attention.protocol import AttentionFactory
from busllm.engine.batch import RaggedBatch, SlotPages, make_batch
from busllm.engine.forward import Forward, make_forward
from busllm.engine.graphs import GraphRecorder
from busllm.engine.host_copy import StepMark, copy_to_host
from busllm.engine.kv_cache import KVShape
from busllm.engine.logprobs import PendingLogprobs, token_logprobs
from busllm.engine.models.protocol import CausalModel, attention_config
from busllm.engine.parallel.group import Alone, Group
from busllm.engine.parallel.sampling import sample_together
from busllm.engine.prefault import Prefault
from busllm.engine.runner import ModelInfo
from busllm.engine.sampler import Sampled
from busllm.engine.slot_states import SlotShape, SlotStates
from busllm.engine.staging import to_device
from busllm.engine.step_masks import Masks, StepMasks
from busllm.errors import EngineError
from busllm.grammar.compiler import GrammarCompiler
from busllm.plan import PlanRow, PromptLogprobs, StepPlan, StepResult

HEAD_ROWS = 256  # hidden rows that go through the head at once when a whole prompt's log probabilities are wanted


@dataclass(frozen=True)
class _Allocated:
    """What exists once the sizes are known."""

    forward: Forward
    tables: SlotPages
    slots: SlotStates
    masks: StepMasks | None  # None = another rank chooses the tokens
    kv_prefault: Prefault


@dataclass(frozen=True)
class _PendingPrompt:
    slot: int
    start: int
    parts: tuple[PendingLogprobs, ...]


@dataclass(frozen=True)
class _PendingStep:
    """A launched step; tensors are on the host once `mark` is passed."""

    mark: StepMark
    slots: tuple[int, ...]
    sampled: Sampled | None
    prompts: tuple[_PendingPrompt, ...]


class ModelRunner:
    """Implements `Runner` with a decoder.

    Args:
        decoder: the model, or a rank's part of it.
        model: facts about it.
        device, dtype: of the KV cache.
        attention: makes the backend.
        group: the ranks that share the model; None = it is whole.
        grammars: of the model; None = no request has one.
        recorder: of decode steps, for attention that can be recorded; None = every step is launched kernel by kernel.
    """

    def __init__(
        self,
        decoder: CausalModel,
        model: ModelInfo,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionFactory,
        group: Group | None = None,
        grammars: GrammarCompiler | None = None,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._decoder = decoder
        self._model = model
        self._device = device
        self._dtype = dtype
        self._attention = attention
        self._grammars = grammars
        self._group = group or Alone()
        # A recording with collective operations in it has not been tried on two devices.
        self._recorder = recorder if self._group.shard.num_ranks == 1 else None
        self._allocated: _Allocated | None = None
        self._launched: dict[int, _PendingStep] = {}
        self._last_sampled: dict[int, tuple[int, int]] = {}  # slot → (step, position) of its last sampled token

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        return self._model

    @property
    def depth(self) -> int:
        """0 on CPU, where a step is done when `launch` returns; 1 on CUDA, which runs behind the host."""
        return 1 if self._device.type == "cuda" else 0

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """Makes the KV cache, page tables and sampler state; a second call begins anew."""
        self._launched.clear()
        self._last_sampled.clear()
        shape = self._decoder.config.attention_shape
        max_context_tokens = min(max_context_tokens, self._model.max_context_tokens)
        kv = KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_pages=num_pages,
            page_tokens=page_tokens,
            dtype=self._dtype,
            device=self._device,
        )
        slot_shape = SlotShape(
            max_running=max_running,
            max_context_tokens=max_context_tokens,
            vocab_size=self._decoder.config.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            device=self._device,
        )
        slots = SlotStates(slot_shape, self._grammars)
        attention = self._attention(attention_config(shape, kv))
        self._allocated = _Allocated(
            forward=make_forward(self._decoder, attention, slots, self._recorder),
            tables=SlotPages(
                max_running=max_running,
                max_context_tokens=max_context_tokens,
                num_pages=num_pages,
                page_tokens=page_tokens,
            ),
            slots=slots,
            masks=StepMasks(slots, in_thread=self.depth == 0) if self._group.shard.is_first else None,
            kv_prefault=Prefault(attention.cache.host_memory, self._model.mapped_bytes),
        )

    def prefault_memory(self) -> bool:
        """That of the KV cache."""
        return self._memory().kv_prefault.advance()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> int:
        """Starts a step; on CPU it is done when this returns.

        Raises:
            EngineError: the plan contradicts what the slots hold.
        """
        memory, sampled, prompts = self._memory(), None, []
        self._apply(plan, memory)
        sampling = [(index, row) for index, row in enumerate(plan.rows) if row.samples]
        if plan.rows:
            batch = make_batch(plan, memory.tables)
            self._check_inputs(plan.rows, memory)
            masks = self._begin_masks(sampling, memory)
            states = memory.forward.hidden_states(plan.rows, batch)
            prompts = [self._prompt_logprobs(plan.rows[i], i, batch, states, memory) for i in plan.prompt_logprob_rows]
            if sampling:
                sampled = self._sample(plan.number, sampling, batch, states, masks, memory)
        mark, slots = StepMark(self._device), tuple(row.slot for _, row in sampling)
        if sampled is not None and memory.masks is not None:
            memory.masks.chose(slots, sampled.token_ids, mark)
        self._launched[plan.number] = _PendingStep(
            mark=mark,
            slots=slots,
            sampled=sampled,
            prompts=tuple(prompt for prompt in prompts if prompt is not None),
        )
        return plan.number

    def collect(self, handle: int) -> StepResult:
        """Waits for a launched step.

        Raises:
            EngineError: no such step was launched, or it was collected before.
        """
        step = self._launched.pop(handle, None)
        if step is None:
            raise EngineError(f"step {handle} was not launched or was collected before")
        step.mark.wait()
        rows = () if step.sampled is None else step.sampled.rows(step.slots)
        prompts = tuple(
            PromptLogprobs(prompt.slot, prompt.start, tuple(entry for part in prompt.parts for entry in part.collect()))
            for prompt in step.prompts
        )
        return StepResult(handle, rows, prompts)

    def close(self) -> None:
        """Gives the KV cache back."""
        if self._allocated is not None and self._allocated.masks is not None:
            self._allocated.masks.close()
        self._allocated = None
        self._launched.clear()

    def unallocated_twin(self) -> ModelRunner:
        """One with the same model that has its own cache, slots and recordings."""
        return ModelRunner(
            self._decoder,
            self._model,
            device=self._device,
            dtype=self._dtype,
            attention=self._attention,
            group=self._group,
            grammars=self._grammars,
            recorder=self._recorder,
        )

    def _memory(self) -> _Allocated:
        if self._allocated is None:
            raise EngineError("the runner was used before `allocate` or after `close`")
        return self._allocated

    def _apply(self, plan: StepPlan, memory: _Allocated) -> None:
        for slot in plan.closed:
            memory.slots.close(slot)
            memory.tables.clear(slot)
            self._last_sampled.pop(slot, None)
        for opened in plan.opened:
            memory.slots.open(opened)
        for entry in plan.pages:
            memory.tables.assign(entry)

    def _check_inputs(self, rows: tuple[PlanRow, ...], memory: _Allocated) -> None:
        for row in rows:
            memory.slots.params(row.slot)  # an empty slot has no rows
            if row.from_step is not None:
                self._check_source(row)

    def _check_source(self, row: PlanRow) -> None:
        wanted, last = (row.from_step, row.start), self._last_sampled.get(row.slot)
        if last != wanted:
            raise EngineError(
                f"slot {row.slot} shall read what it sampled as (step, position) {wanted}, but its last is {last}"
            )

    def _begin_masks(self, sampling: list[tuple[int, PlanRow]], memory: _Allocated) -> Callable[[], Masks]:
        if memory.masks is None:
            return dict
        return memory.masks.begin([(row.slot, row.start + row.num_tokens) for _, row in sampling])

    def _sample(
        self,
        number: int,
        sampling: list[tuple[int, PlanRow]],
        batch: RaggedBatch,
        states: torch.Tensor,
        masks: Callable[[], Masks],
        memory: _Allocated,
    ) -> Sampled:
        rows = np.array([index for index, _ in sampling])
        slots, positions = batch.slots[rows], batch.kv_lengths[rows].astype(np.int64)  # the new token follows its row
        last_hidden = states  # where each token is a row of its own that samples
        if batch.num_tokens > len(sampling):
            last_hidden = states[self._to_device(batch.cu_seqlens[rows + 1].astype(np.int64) - 1)]
        logits = self._decoder.logits(last_hidden)
        scans = self._decoder.row_scans
        sampled = sample_together(logits, slots, positions, memory.slots, masks, self._group, scans)
        memory.slots.append(slots, positions, sampled.token_ids)
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            self._last_sampled[slot] = (number, position)
        logprobs = None if sampled.logprobs is None else sampled.logprobs.to_host()
        is_finite = None if sampled.is_finite is None else copy_to_host(sampled.is_finite)
        return replace(sampled, token_ids=copy_to_host(sampled.token_ids), logprobs=logprobs, is_finite=is_finite)

    def _prompt_logprobs(
        self, row: PlanRow, index: int, batch: RaggedBatch, states: torch.Tensor, memory: _Allocated
    ) -> _PendingPrompt | None:
        """Each hidden state of a row against the prompt token that follows it."""
        num_prompt_tokens = int(memory.slots.num_prompt_tokens[row.slot])
        count = min(row.num_tokens, num_prompt_tokens - 1 - row.start)
        if count < 1:
            return None
        first = int(batch.cu_seqlens[index])
        followers = memory.slots.tokens[row.slot, row.start + 1 : row.start + 1 + count]
        num_top = memory.slots.params(row.slot).prompt_logprobs or 0
        parts = []
        for hidden, token_ids in zip(
            torch.split(states[first : first + count], HEAD_ROWS), torch.split(followers, HEAD_ROWS), strict=True
        ):
            logits = self._decoder.logits(hidden)  # all ranks give their part, the first has the whole
            if self._group.shard.is_first:
                parts.append(token_logprobs(logits, token_ids, [num_top] * len(token_ids)).to_host())
        return _PendingPrompt(row.slot, row.start + 1, tuple(parts))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)
