"""Masks are made beside the forward pass: on a CPU by a thread, on a device by the host while the device computes."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.model_runner import ModelRunner
from busllm.engine.slot_states import SlotShape, SlotStates
from busllm.engine.step_masks import StepMasks
from busllm.errors import EngineError
from busllm.grammar.compiler import GrammarCompiler
from busllm.grammar.matcher import GrammarMatcher
from busllm.grammar.vocabulary import Vocabulary
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import Grammar, GrammarKind, SamplingParams
from busllm.testing.random_runner import SMALL_LLAMA, random_runner
from tests.engine.test_two_phases import NoWeights

VOCAB = 512
EOS = 256
TINY = {**SMALL_LLAMA, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2}
YES = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.CHOICE, json.dumps(["yes", "no"])))
FREE = SamplingParams(temperature=0.0)
PROMPT = np.arange(5, dtype="<i4").tobytes()


def bytes_vocabulary() -> Vocabulary:
    tokens = tuple(bytes([value]) for value in range(256)) + (b"<eos>",) + (b"",) * (VOCAB - 257)
    return Vocabulary(tokens, frozenset({EOS}), (EOS,), lambda text: list(text.encode()))


def slots_of(*rows: SamplingParams) -> SlotStates:
    states = SlotStates(SlotShape(len(rows), 64, VOCAB, (EOS,), torch.device("cpu")), GrammarCompiler(bytes_vocabulary))
    for slot, params in enumerate(rows):
        states.open(SlotOpened(slot, params, 7, PROMPT, 5))
    return states


def letters(mask: Any) -> str:
    assert not isinstance(mask, str)
    return "".join(chr(token_id) for token_id in np.flatnonzero(mask))


class NotedMark:
    """Notes that somebody waits for it."""

    def __init__(self, notes: list[str], name: str = "wait") -> None:
        self._notes = notes
        self._name = name

    def wait(self) -> None:
        self._notes.append(self._name)


def test_masks_of_a_device_wait_for_the_tokens_before_only_when_they_are_asked_for() -> None:
    notes: list[str] = []
    masks = StepMasks(slots_of(FREE, YES), in_thread=False)
    assert {row: letters(mask) for row, mask in masks.begin([(0, 5), (1, 5)])().items()} == {1: "ny"}
    masks.chose((0, 1), torch.tensor([9, ord("y")]), NotedMark(notes, "first"))
    second = masks.begin([(1, 6)])
    assert notes == []
    assert letters(second()[0]) == "e"
    masks.chose((1,), torch.tensor([ord("e")]), NotedMark(notes, "second"))
    assert letters(masks.begin([(1, 7)])()[0]) == "s"
    assert notes == ["first", "second"]


def test_a_step_without_a_grammar_waits_for_nobody() -> None:
    notes: list[str] = []
    masks = StepMasks(slots_of(FREE, YES), in_thread=False)
    masks.chose((1,), torch.tensor([ord("y")]), NotedMark(notes))
    assert masks.begin([(0, 6)])() == {}
    assert notes == []


def test_a_token_of_one_who_has_left_does_not_reach_who_has_the_slot_now() -> None:
    slots = slots_of(YES)
    masks = StepMasks(slots, in_thread=False)
    masks.begin([(0, 5)])()
    masks.chose((0,), torch.tensor([ord("n")]), NotedMark([]))
    slots.close(0)
    slots.open(SlotOpened(0, YES, 7, PROMPT, 5))
    assert letters(masks.begin([(0, 5)])()[0]) == "ny"


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_grammar_that_missed_a_token_is_an_error(in_thread: bool) -> None:
    masks = StepMasks(slots_of(YES), in_thread=in_thread)
    made = masks.begin([(0, 6)])
    with pytest.raises(EngineError, match="knows 0 tokens, there are 1"):
        made()
    masks.close()


def plan(number: int, start: int, params: SamplingParams) -> StepPlan:
    """A prompt of five tokens, or the decode row that follows it."""
    if number == 0:
        opened, pages = (SlotOpened(0, params, 7, PROMPT, 5),), (PagesAssigned(0, 0, (3, 1)),)
        return StepPlan(0, (PlanRow(0, 0, 5, PROMPT, None, True),), 0, opened=opened, pages=pages)
    return StepPlan(number, (PlanRow(0, start, 1, None, number - 1, True),), 1)


def runner_of(kind: type[ModelRunner], device: torch.device, compiler: GrammarCompiler, **options: Any) -> ModelRunner:
    made = random_runner(TINY, TorchAttention, device=device, dtype=torch.float32, **options)
    runner = kind(
        made._decoder, made.model, device=device, dtype=torch.float32, attention=TorchAttention, grammars=compiler
    )
    runner.allocate(num_pages=16, page_tokens=4, max_running=2, max_context_tokens=32)
    return runner


class LateRunner(ModelRunner):
    """As on CUDA: the device runs behind the host."""

    @property
    def depth(self) -> int:
        return 1


class Noted(TorchDispatchMode):
    """Notes what is launched."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._notes.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_forward_pass_is_launched_before_the_host_waits_for_the_token_that_the_mask_needs() -> None:
    notes: list[str] = []
    runner = runner_of(LateRunner, NoWeights.device, GrammarCompiler(bytes_vocabulary), weights=NoWeights())
    runner.launch(plan(0, 0, YES))
    masks = runner._memory().masks
    assert masks is not None
    (chosen,) = masks._chosen
    masks._chosen[0] = chosen._replace(token_ids=torch.tensor([ord("y")]), mark=NotedMark(notes))  # meta has no values
    with Noted(notes):
        runner.launch(plan(1, 5, YES))
    products = [index for index, note in enumerate(notes) if note in ("mm", "bmm", "linear", "matmul")]
    assert len(products) > 10
    waits = notes.index("wait")
    assert max(products) < waits
    assert {"masked_fill_", "argmax"} <= set(notes[waits:])


class NotingCompiler(GrammarCompiler):
    """Tells when a matcher is made: then the masks are being made."""

    def __init__(self) -> None:
        super().__init__(bytes_vocabulary)
        self.has_begun = threading.Event()
        self.thread = ""

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        self.thread = threading.current_thread().name
        self.has_begun.set()
        return super().matcher(grammar)


class PatientDecoder:
    """Computes nothing before the masks are being made."""

    def __init__(self, decoder: Any, compiler: NotingCompiler) -> None:
        self._decoder = decoder
        self._compiler = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def hidden_states(self, *arguments: Any) -> torch.Tensor:
        assert self._compiler.has_begun.wait(20)
        states: torch.Tensor = self._decoder.hidden_states(*arguments)
        return states


def test_on_a_cpu_a_thread_makes_the_masks_while_the_forward_pass_runs() -> None:
    compiler, device = NotingCompiler(), torch.device("cpu")
    made = random_runner(TINY, TorchAttention, device=device, dtype=torch.float32)
    decoder: Any = PatientDecoder(made._decoder, compiler)
    runner = ModelRunner(
        decoder, made.model, device=device, dtype=torch.float32, attention=TorchAttention, grammars=compiler
    )
    runner.allocate(num_pages=16, page_tokens=4, max_running=2, max_context_tokens=32)
    text = b""
    for number in range(2):
        result = runner.collect(runner.launch(plan(number, 4 + number, YES)))
        text += bytes(result.rows[0].token_ids)
    runner.close()
    assert text in (b"ye", b"no")
    assert compiler.thread.startswith("masks")
