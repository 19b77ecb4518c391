"""A runner without a model: any machine can run it, and everybody can say in advance what it answers.

Owns: the tokens of `source = "null"`: token = f(seed, position, prompt), printable ASCII. Step and load time can be
set. Temperature, penalties, biases and all else that shapes a distribution are ignored, for there is none.
`min_tokens`, end-of-turn and stop tokens and grammars are honoured.
Does not know: pages beyond what `engine/plan_check.py` checks for it.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from busllm.engine.plan_check import PlanCheck
from busllm.engine.runner import ModelInfo
from busllm.engine.slot_grammars import SlotGrammars
from busllm.errors import EngineError
from busllm.grammar.compiler import GrammarCompiler
from busllm.plan import PlanRow, PromptLogprobs, SampledRow, SlotOpened, StepPlan, StepResult, TokenLogprobs
from busllm.sampling import SamplingParams, mix64

NULL_VOCAB_SIZE = 259  # the 256 bytes, then three special tokens
NULL_EOS_TOKEN_ID = 256
_FIRST_PRINTABLE = 32
_NUM_PRINTABLE = 95


class NullSequence:
    """What the null model answers to one prompt with one seed.

    Args:
        prompt: packed int32 little-endian token ids.
        params: of the request.
        seed: unsigned 64-bit seed of the choice.
        eos_one_in: how often the end-of-turn token comes: at one position in so many, on average; None = never.
    """

    def __init__(self, prompt: bytes, params: SamplingParams, seed: int, eos_one_in: int | None) -> None:
        digest = hashlib.blake2b(prompt, digest_size=8).digest()
        self._key = mix64(seed ^ int.from_bytes(digest, "little"))
        self._num_prompt_tokens = len(prompt) // 4
        self._params = params
        self._eos_one_in = eos_one_in

    def token(self, position: int, allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """The token at `position`, counted from the prompt's first.

        Args:
            allowed: bool (NULL_VOCAB_SIZE,), what the grammar leaves; None = there is none.
        """
        draw = mix64(self._key ^ position)
        may_end = position - self._num_prompt_tokens >= self._params.min_tokens
        wants_end = may_end and self._eos_one_in is not None and mix64(draw) % self._eos_one_in == 0
        if allowed is not None:
            return self._allowed_token(draw, allowed, wants_end)
        if wants_end:
            return NULL_EOS_TOKEN_ID
        for offset in range(_NUM_PRINTABLE):
            token_id = _FIRST_PRINTABLE + (draw + offset) % _NUM_PRINTABLE
            if may_end or token_id not in self._params.stop_token_ids:
                return token_id
        raise EngineError("every printable token is a stop token, and min_tokens forbids them all")

    def _allowed_token(self, draw: int, allowed: npt.NDArray[np.bool_], wants_end: bool) -> int:
        """An end when it is wanted and allowed, else something printable if there is, else anything."""
        if wants_end and allowed[NULL_EOS_TOKEN_ID]:
            return NULL_EOS_TOKEN_ID
        printable = _FIRST_PRINTABLE + np.flatnonzero(allowed[_FIRST_PRINTABLE : _FIRST_PRINTABLE + _NUM_PRINTABLE])
        others = np.flatnonzero(allowed)
        choices = printable if printable.size else others[others != NULL_EOS_TOKEN_ID]
        return int(choices[draw % choices.size]) if choices.size else NULL_EOS_TOKEN_ID


def null_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Made-up log probabilities: the chosen token is the most likely one, others follow at equal distances."""
    chosen = -(1 + token_id % 7) / 8
    return TokenLogprobs(chosen, tuple(((token_id + i) % NULL_VOCAB_SIZE, chosen - i) for i in range(num_top)))


class _Slot:
    def __init__(self, opened: SlotOpened, eos_one_in: int | None) -> None:
        self.params = opened.params
        self.prompt = opened.token_ids[: 4 * opened.num_prompt_tokens]
        self.sequence = NullSequence(self.prompt, opened.params, opened.seed, eos_one_in)

    def sample(self, slot: int, position: int, grammars: SlotGrammars) -> SampledRow:
        """The token at a position. It depends on the ones before by the grammar alone."""
        state = grammars.of(slot)
        mask = None if state is None else state.mask()
        if isinstance(mask, str):
            return SampledRow(slot, (NULL_EOS_TOKEN_ID,), failure=mask)
        token_id = self.sequence.token(position, mask)
        if state is not None:
            state.add(token_id)
        num_top = self.params.logprobs
        return SampledRow(slot, (token_id,), () if num_top is None else (null_logprobs(token_id, num_top),))


class NullRunner:
    """Executes plans without computing.

    Args:
        step_time_s: how long a step takes.
        load_time_s: how long `allocate` takes.
        depth: steps in flight beyond the one being collected.
        max_context_tokens: of the model.
        eos_one_in: see `NullSequence`; None = answers end by `max_tokens` only.
        check_plans: whether every plan is checked as a strict executor would.
        grammars: of the null model; None = no request has one.
    """

    def __init__(
        self,
        *,
        step_time_s: float = 0.0,
        load_time_s: float = 0.0,
        depth: int = 0,
        max_context_tokens: int = 8192,
        eos_one_in: int | None = None,
        check_plans: bool = True,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._step_time_s = step_time_s
        self._load_time_s = load_time_s
        self._depth = depth
        self._eos_one_in = eos_one_in
        self._check_plans = check_plans
        self._check: PlanCheck | None = None
        self._slots: dict[int, _Slot] = {}
        self._grammars = SlotGrammars(grammars)
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._busy_until_s = 0.0
        self._model = ModelInfo(
            name="null",
            vocab_size=NULL_VOCAB_SIZE,
            max_context_tokens=max_context_tokens,
            eos_token_ids=(NULL_EOS_TOKEN_ID,),
            kv_bytes_per_token=0,
            fingerprint=f"{mix64(max_context_tokens ^ mix64(eos_one_in or 0)):016x}",
        )

    @property
    def model(self) -> ModelInfo:
        """Facts about the model that is not there."""
        return self._model

    @property
    def depth(self) -> int:
        """As given."""
        return self._depth

    def allocate(self, *, num_pages: int, page_tokens: int, max_running: int, max_context_tokens: int) -> None:
        """Takes `load_time_s`."""
        time.sleep(self._load_time_s)
        if self._check_plans:
            self._check = PlanCheck(
                num_pages=num_pages,
                page_tokens=page_tokens,
                max_running=max_running,
                max_context_tokens=max_context_tokens,
            )

    def prefault_memory(self) -> bool:
        """There is none."""
        return False

    def launch(self, plan: StepPlan) -> int:
        """Starts a step: it begins when the one before is done, and takes `step_time_s` from then.

        Raises:
            EngineError: the plan is wrong.
        """
        if self._check is not None:
            self._check.launch(plan)
        self._busy_until_s = max(self._busy_until_s, time.monotonic()) + self._step_time_s
        self._launched.append((plan, self._busy_until_s))
        return plan.number

    def collect(self, handle: int) -> StepResult:
        """Waits until the step's time is over, which what is computed here counts towards.

        Raises:
            EngineError: steps are collected out of order, or a row relied on pages that hold something else.
        """
        plan, done_at_s = self._launched.popleft()
        if plan.number != handle:
            raise EngineError(f"step {handle} was to be collected, but step {plan.number} is the oldest")
        result = self._execute(plan)
        if self._check is not None:
            self._check.collect(result)
        left_s = done_at_s - time.monotonic()
        if left_s > 0.0:
            time.sleep(left_s)
        return result

    def close(self) -> None:
        """There is nothing to give back."""

    def _execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.closed:
            del self._slots[slot]
            self._grammars.close(slot)
        for opened in plan.opened:
            self._slots[opened.slot] = _Slot(opened, self._eos_one_in)
            output_ids = np.frombuffer(opened.token_ids, dtype="<i4")[opened.num_prompt_tokens :]
            self._grammars.open(opened.slot, opened.params, output_ids.tolist())
        return StepResult(
            plan.number,
            tuple(self._sample(row) for row in plan.rows if row.samples),
            tuple(self._score(plan.rows[index]) for index in plan.prompt_logprob_rows),
        )

    def _sample(self, row: PlanRow) -> SampledRow:
        return self._slots[row.slot].sample(row.slot, row.start + row.num_tokens, self._grammars)

    def _score(self, row: PlanRow) -> PromptLogprobs:
        """Position i is predicted by the row's hidden state at i - 1; the prompt's last one predicts the output."""
        slot = self._slots[row.slot]
        first, last = row.start + 1, min(row.start + row.num_tokens, len(slot.prompt) // 4 - 1)
        ids = np.frombuffer(slot.prompt, dtype="<i4")[first : last + 1].tolist()
        return PromptLogprobs(
            row.slot, first, tuple(null_logprobs(token_id, slot.params.prompt_logprobs or 0) for token_id in ids)
        )
