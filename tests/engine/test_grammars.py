"""Sequences under a grammar: in any company, after any interruption, the same answer, and always one that it allows."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.null import NULL_EOS_TOKEN_ID, NullRunner
from busllm.engine.sampler import sample
from busllm.engine.sequence import FinishReason
from busllm.engine.slot_states import SlotShape, SlotStates
from busllm.errors import EngineError, InvalidRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.grammar.vocabulary import Vocabulary
from busllm.model_store.resolve import resolve
from busllm.plan import SlotOpened
from busllm.sampling import Grammar, GrammarKind, SamplingParams
from busllm.testing.engine_driver import EngineDriver, Record, sequence_request
from busllm.testing.null_engine import NullEngineDriver
from busllm.testing.tiny_model import write_tiny_model
from busllm.text.vocabulary import load_vocabulary

PROMPT = [ord(letter) for letter in "Say something."]
NUMBERS = Grammar(GrammarKind.REGEX, r"[0-9]{3}(-[0-9]{3}){8}")
OPEN_END = Grammar(GrammarKind.REGEX, r"[a-f]{5,40}")
PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["cat", "dog"]}},
            "required": ["age", "kind"],
            "additionalProperties": False,
        }
    ),
)
BROKEN = Grammar(GrammarKind.REGEX, "[0-9", "structured_outputs.regex")


def params(grammar: Grammar | None, **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "seed": 1, **values}, grammar=grammar)


def text_of(record: Record) -> str:
    return bytes(token_id for token_id in record.output if token_id < 256).decode()


def alone(grammar: Grammar | None, *, depth: int = 0, seed: int = 3, **values: Any) -> Record:
    run = NullEngineDriver(depth, eos_one_in=10)
    run.submit(sequence_request("a", PROMPT, params(grammar, **values), seed=seed))
    run.run()
    assert run.is_idle
    return run.records["a", 0]


class TestAroundTheNullEngine:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_an_answer_ends_with_stop_when_its_grammar_is_complete(self, depth: int) -> None:
        record = alone(NUMBERS, depth=depth)
        assert re.fullmatch(NUMBERS.text, text_of(record))
        assert record.output[-1] == NULL_EOS_TOKEN_ID
        assert record.finish_reason is FinishReason.STOP

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_grammar_goes_before_min_tokens_and_ignore_eos(self, depth: int) -> None:
        record = alone(NUMBERS, depth=depth, min_tokens=100, ignore_eos=True)
        assert record.output == alone(NUMBERS).output
        assert record.finish_reason is FinishReason.STOP

    def test_where_it_may_end_or_go_on_the_model_decides_unless_told_to_ignore_its_end(self) -> None:
        short, long = alone(OPEN_END), alone(OPEN_END, ignore_eos=True)
        assert 5 <= len(text_of(short)) < 40
        assert len(text_of(long)) == 40
        assert len(text_of(alone(OPEN_END, min_tokens=30))) >= 30

    def test_max_tokens_cuts_an_answer(self) -> None:
        record = alone(NUMBERS, max_tokens=6)
        assert (record.output, record.finish_reason) == (alone(NUMBERS).output[:6], FinishReason.LENGTH)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_stop_token_ends_where_it_comes(self, depth: int) -> None:
        record = alone(NUMBERS, depth=depth, stop_token_ids=(ord("-"),))
        assert (record.output, record.finish_reason) == (alone(NUMBERS).output[:4], FinishReason.STOP)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_an_answer_sent_on_from_any_token_goes_on_under_its_grammar(self, depth: int) -> None:
        for grammar in (NUMBERS, PERSON, OPEN_END):
            whole = alone(grammar, max_tokens=40)
            for delivered in range(len(whole.output) + 1):
                run = NullEngineDriver(depth, eos_one_in=10)
                output = whole.output[:delivered]
                request = sequence_request(
                    "a", PROMPT, params(grammar, max_tokens=40), seed=3, attempt=2, output=output
                )
                run.submit(request)
                run.run()
                assert run.records["a", 0].output == whole.output
                assert run.records["a", 0].finish_reason is whole.finish_reason
                assert run.is_idle

    @pytest.mark.parametrize("depth", [0, 1])
    def test_retraction_and_company_change_no_answer(self, depth: int) -> None:
        grammars = [NUMBERS, None, PERSON, OPEN_END, None, NUMBERS]
        run = NullEngineDriver(depth, eos_one_in=10, num_pages=24, expected_output_tokens=0)
        for number, grammar in enumerate(grammars):
            run.submit(sequence_request(f"u{number}", PROMPT, params(grammar, max_tokens=36), seed=number))
        run.run()
        assert run.engine.statistics().retractions > 0
        for number, grammar in enumerate(grammars):
            expected = alone(grammar, seed=number, max_tokens=36)
            assert run.records[f"u{number}", 0].output == expected.output
        assert run.is_idle

    def test_a_running_sequence_that_is_adopted_goes_on(self) -> None:
        run = NullEngineDriver(eos_one_in=10)
        run.submit(sequence_request("a", PROMPT, params(NUMBERS), seed=3))
        run.step_until_output("a", 7)
        delivered = run.records["a", 0].output[:4]
        run.submit(sequence_request("a", PROMPT, params(NUMBERS), seed=3, attempt=2, output=delivered))
        run.run()
        assert run.records["a", 0].output == alone(NUMBERS).output

    def test_what_does_not_compile_fails_alone(self) -> None:
        run = NullEngineDriver(eos_one_in=10)
        run.submit(sequence_request("bad", PROMPT, params(BROKEN)))
        run.submit(sequence_request("good", PROMPT, params(NUMBERS), seed=3))
        run.run()
        assert run.records["good", 0].output == alone(NUMBERS).output
        error = run.failures["bad", 0]
        assert isinstance(error, InvalidRequest)
        assert error.param == "structured_outputs.regex"
        assert not run.records["bad", 0].output
        assert run.is_idle

    def test_output_that_the_grammar_does_not_allow_fails_alone(self) -> None:
        run = NullEngineDriver(eos_one_in=10)
        run.submit(sequence_request("bad", PROMPT, params(NUMBERS), attempt=2, output=[ord("x")]))
        run.submit(sequence_request("good", PROMPT, params(NUMBERS), seed=3))
        run.run()
        assert "cannot be followed" in run.failures["bad", 0].message
        assert run.records["good", 0].output == alone(NUMBERS).output
        assert run.is_idle


class SlowVocabulary:
    """A null model whose first grammar takes until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.driver = EngineDriver(self._engine())

    def _engine(self) -> Engine:
        def load() -> Vocabulary:
            assert self.go_on.wait(20)
            return load_vocabulary(resolve("null"))

        compiler = GrammarCompiler(load)
        return Engine(NullRunner(grammars=compiler), EngineConfig(num_pages=64), compiler)


class TestWhileAGrammarIsCompiled:
    @pytest.fixture
    def slow(self):  # type: ignore[no-untyped-def]
        slow = SlowVocabulary()
        yield slow
        slow.go_on.set()
        slow.driver.engine.close()

    def test_others_run_and_it_has_its_turn_afterwards(self, slow: SlowVocabulary) -> None:
        slow.driver.submit(sequence_request("waits", PROMPT, params(NUMBERS), seed=3))
        slow.driver.submit(sequence_request("runs", PROMPT, params(None, max_tokens=5)))
        while slow.driver.records["runs", 0].finish_reason is None:
            slow.driver.step()
        assert slow.driver.engine.has_work
        assert slow.driver.step().tokens == ()
        slow.driver.engine.hold([("waits", 0)])
        slow.driver.engine.hold([])
        assert slow.driver.names("waits") == ["queued"]
        slow.go_on.set()
        slow.driver.run()
        assert re.fullmatch(NUMBERS.text, text_of(slow.driver.records["waits", 0]))

    def test_a_sequence_that_is_held_back_stays_so(self, slow: SlowVocabulary) -> None:
        slow.driver.submit(sequence_request("waits", PROMPT, params(NUMBERS), seed=3))
        slow.driver.engine.hold([("waits", 0)])
        slow.go_on.set()
        slow.driver.run()
        assert slow.driver.names("waits") == ["queued"]
        slow.driver.engine.hold([])
        slow.driver.run()
        assert "finished" in slow.driver.names("waits")

    def test_it_can_be_aborted(self, slow: SlowVocabulary) -> None:
        slow.driver.submit(sequence_request("waits", PROMPT, params(NUMBERS)))
        slow.driver.step()
        assert slow.driver.engine.abort("waits") == 1
        slow.driver.run()
        assert not slow.driver.engine.live()
        assert slow.driver.engine.statistics().waiting == 0


def test_a_runner_without_a_compiler_takes_no_grammar() -> None:
    driver = EngineDriver(Engine(NullRunner(), EngineConfig(num_pages=64)))
    with pytest.raises(InvalidRequest, match="not supported by this model"):
        driver.submit(sequence_request("a", PROMPT, params(NUMBERS)))
    assert not driver.engine.has_work


# ---------------------------------------------------------------- in torch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def compiler(tiny: Path) -> GrammarCompiler:
    return GrammarCompiler(lambda: load_vocabulary(resolve(str(tiny))))


def torch_driver(tiny: Path, compiler: GrammarCompiler) -> EngineDriver:
    runner = load_runner(str(tiny), LoadConfig(device="cpu"), grammars=compiler)
    return EngineDriver(Engine(runner, EngineConfig(num_pages=256, max_context_tokens=400), compiler))


CASES = (
    (PERSON, {"temperature": 1.0}),
    (NUMBERS, {"temperature": 0.0, "logprobs": 2}),
    (None, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "max_tokens": 40}),
    (OPEN_END, {"temperature": 1.0, "top_k": 3, "presence_penalty": 1.0}),
    (None, {"temperature": 0.0, "max_tokens": 30}),
)


def test_a_model_keeps_to_its_grammars_alone_and_beside_others_to_the_bit(
    tiny: Path, compiler: GrammarCompiler
) -> None:
    requests = [
        sequence_request(f"u{number}", PROMPT, params(grammar, **values), seed=number)
        for number, (grammar, values) in enumerate(CASES)
    ]
    together, solo = torch_driver(tiny, compiler), torch_driver(tiny, compiler)
    for request in requests:
        together.submit(request)
    together.run()
    for request in requests:
        solo.submit(request)
        solo.run()
    for uid, (grammar, _) in zip([request.uid for request in requests], CASES, strict=True):
        record = together.records[uid, 0]
        assert record == solo.records[uid, 0]
        if grammar is PERSON:
            assert json.loads(text_of(record))["kind"] in ("cat", "dog")
        elif grammar is not None:
            assert re.fullmatch(grammar.text, text_of(record))
        if grammar is not None:
            assert record.finish_reason is FinishReason.STOP


def test_a_model_goes_on_under_the_grammar_after_it_was_sent_on(tiny: Path, compiler: GrammarCompiler) -> None:
    driver = torch_driver(tiny, compiler)
    driver.submit(sequence_request("a", PROMPT, params(PERSON, temperature=1.0), seed=5))
    driver.run()
    whole = driver.records["a", 0].output
    for delivered in (1, 5, len(whole) - 1, len(whole)):
        request = sequence_request(
            f"a{delivered}", PROMPT, params(PERSON, temperature=1.0), seed=5, attempt=2, output=whole[:delivered]
        )
        driver.submit(request)
        driver.run()
        assert driver.records[f"a{delivered}", 0].output == whole


# ---------------------------------------------------------------- in the sampler


VOCAB = 300
EOS = 256


def byte_compiler() -> GrammarCompiler:
    tokens = tuple(bytes([value]) for value in range(256)) + (b"<eos>",) + (b"",) * (VOCAB - 257)
    return GrammarCompiler(lambda: Vocabulary(tokens, frozenset({EOS}), (EOS,), lambda text: list(text.encode())))


def choose(
    logits: torch.Tensor, *rows: SamplingParams, output: bytes = b"", compiler: GrammarCompiler | None = None
) -> tuple[list[int], dict[int, str]]:
    states = SlotStates(SlotShape(len(rows), 64, VOCAB, (EOS,), torch.device("cpu")), compiler or byte_compiler())
    known = np.array([1, 2, 3, *output], dtype="<i4").tobytes()
    for slot, row in enumerate(rows):
        states.open(SlotOpened(slot, row, 7, known, 3))
    slots, positions = np.arange(len(rows)), np.full(len(rows), 3 + len(output))
    sampled = sample(logits.clone(), slots, positions, states)
    return [row.token_ids[0] for row in sampled.rows(slots.tolist())], dict(sampled.failures)


def greedy(grammar: Grammar | None, **values: Any) -> SamplingParams:
    return params(grammar, temperature=0.0, **values)


def test_the_mask_reaches_its_own_row_only() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    free = logits.argmax(dim=-1).tolist()
    yes = Grammar(GrammarKind.CHOICE, '["yes"]')
    tokens, failures = choose(logits, greedy(None), greedy(yes), greedy(None))
    assert tokens == [free[0], ord("y"), free[2]]
    assert not failures


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 2.0])
def test_no_other_setting_gets_past_the_mask(temperature: float) -> None:
    yes = Grammar(GrammarKind.CHOICE, '["yes"]')
    logits = torch.full((1, VOCAB), 20.0)
    logits[0, ord("y")] = -80.0
    against = params(
        yes,
        temperature=temperature,
        logit_bias=((ord("y"), -100.0), (7, 100.0)),
        top_k=1,
        top_p=0.1,
        min_p=0.5,
        frequency_penalty=2.0,
        repetition_penalty=2.0,
    )
    assert choose(logits, against) == ([ord("y")], {})
    logits[0] = torch.nan
    logits[0, 7] = torch.inf
    assert choose(logits, against) == ([ord("y")], {})


def test_before_min_tokens_an_end_comes_only_when_nothing_else_can() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 50.0
    digits = Grammar(GrammarKind.REGEX, "[0-9]{1,2}")
    assert choose(logits, greedy(digits), output=b"1")[0] == [EOS]
    assert choose(logits, greedy(digits, min_tokens=9), output=b"1")[0] == [ord("0")]
    assert choose(logits, greedy(digits, ignore_eos=True), output=b"1")[0] == [ord("0")]
    assert choose(logits, greedy(digits, min_tokens=9, ignore_eos=True), output=b"12")[0] == [EOS]


def test_log_probabilities_are_those_of_the_model_without_the_grammar() -> None:
    yes = Grammar(GrammarKind.CHOICE, '["yes"]')
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    states = SlotStates(SlotShape(1, 64, VOCAB, (EOS,), torch.device("cpu")), byte_compiler())
    states.open(SlotOpened(0, greedy(yes, logprobs=3), 7, b"\1\0\0\0", 1))
    (row,) = sample(logits.clone(), np.array([0]), np.array([1]), states).rows([0])
    raw = logits[0].log_softmax(dim=-1)
    assert row.logprobs[0].chosen == pytest.approx(raw[ord("y")].item(), abs=1e-6)
    assert [token_id for token_id, _ in row.logprobs[0].top] == raw.topk(3).indices.tolist()


def test_a_row_that_cannot_go_on_fails_and_leaves_its_neighbours_alone() -> None:
    letters = GrammarCompiler(
        lambda: Vocabulary((b"a", b"<eos>"), frozenset({1}), (1,), lambda text: [0] * text.count("a"))
    )
    states = SlotStates(SlotShape(2, 8, 2, (1,), torch.device("cpu")), letters)
    stuck = Grammar(GrammarKind.REGEX, "ab")
    for slot, grammar in enumerate((stuck, None)):
        states.open(SlotOpened(slot, greedy(grammar), 0, np.array([0, 0], dtype="<i4").tobytes(), 1))
    sampled = sample(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), np.array([0, 1]), np.array([2, 2]), states)
    assert set(sampled.failures) == {0}
    first, second = sampled.rows([0, 1])
    assert first.failure is not None
    assert (second.token_ids, second.failure) == ((1,), None)


def test_a_slot_that_is_used_again_begins_its_own_grammar() -> None:
    states = SlotStates(SlotShape(1, 64, VOCAB, (EOS,), torch.device("cpu")), byte_compiler())
    logits, slots = torch.zeros(1, VOCAB), np.array([0])
    for text in ("no", "yes"):
        grammar = Grammar(GrammarKind.CHOICE, json.dumps([text]))
        states.open(SlotOpened(0, greedy(grammar), 0, b"\1\0\0\0", 1))
        for position, letter in enumerate(text, start=1):
            token_ids = sample(logits.clone(), slots, np.array([position]), states).token_ids
            assert token_ids.tolist() == [ord(letter)]
            states.tokens[0, position] = token_ids[0]
        states.close(0)


def test_a_runner_that_was_made_without_a_compiler_says_so() -> None:
    states = SlotStates(SlotShape(1, 64, VOCAB, (EOS,), torch.device("cpu")))
    states.open(SlotOpened(0, greedy(NUMBERS), 0, b"\1\0\0\0", 1))
    with pytest.raises(EngineError, match="without a compiler"):
        sample(torch.zeros(1, VOCAB), np.array([0]), np.array([1]), states)
