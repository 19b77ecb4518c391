"""While a grammar is compiled the others run, and nothing is compiled where they would wait for it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter

import pytest

from busllm.engine import grammar_wait
from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.errors import InvalidRequest
from busllm.grammar.compiler import MAX_CACHED, CompiledGrammar, GrammarCompiler
from busllm.grammar.vocabulary import Vocabulary
from busllm.model_store.resolve import resolve
from busllm.sampling import Grammar, GrammarKind
from busllm.testing.engine_driver import EngineDriver, sequence_request
from busllm.testing.null_engine import NullEngineDriver
from busllm.text.vocabulary import load_vocabulary
from tests.engine.grammar_cases import NUMBERS, PROMPT, params, text_of


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

    def test_a_turn_with_other_work_does_not_wait_for_it(
        self, slow: SlowVocabulary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grammar_wait, "LOOK_S", 15.0)
        slow.driver.submit(sequence_request("waits", PROMPT, params(NUMBERS), seed=3))
        slow.driver.submit(sequence_request("runs", PROMPT, params(None, max_tokens=5)))
        began = time.monotonic()
        while slow.driver.records["runs", 0].finish_reason is None:
            slow.driver.step()
        assert time.monotonic() - began < 15
        slow.go_on.set()
        slow.driver.run()
        assert slow.driver.records["waits", 0].finish_reason is not None

    def test_a_turn_without_other_work_does(self, slow: SlowVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar_wait, "LOOK_S", 0.05)
        slow.driver.submit(sequence_request("waits", PROMPT, params(NUMBERS), seed=3))
        slow.driver.step()  # hands out that it is queued
        began = time.monotonic()
        slow.driver.step()
        assert time.monotonic() - began >= 0.05


class CountingCompiler(GrammarCompiler):
    """Notes in which threads it compiles."""

    def __init__(self) -> None:
        super().__init__(lambda: load_vocabulary(resolve("null")))
        self.threads: Counter[str] = Counter()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        self.threads[threading.current_thread().name.rpartition("_")[0]] += 1
        return super()._compile(grammar)


@pytest.mark.parametrize("depth", [0, 1])
def test_every_grammar_is_compiled_once_and_never_by_the_thread_that_steps(depth: int) -> None:
    """More of them wait than are kept for others to come; they are retracted, adopted and sent on meanwhile."""
    compiler = CountingCompiler()
    sizes = {"num_pages": 32, "max_running": 4, "max_waiting": 200, "expected_output_tokens": 0}
    run = NullEngineDriver(depth, grammars=compiler, **sizes)
    number = MAX_CACHED + 8
    grammars = [Grammar(GrammarKind.REGEX, f"[a-z]{{40}}{index}") for index in range(number)]
    for index, grammar in enumerate(grammars):
        run.submit(sequence_request(f"u{index}", PROMPT, params(grammar)))
    run.step_until_output("u0", 5)
    run.step_until_output("u1", 5)
    delivered = run.records["u0", 0].output[:3]
    run.submit(sequence_request("u0", PROMPT, params(grammars[0]), attempt=2, output=delivered))  # adopted
    run.submit(sequence_request("u1", PROMPT, params(grammars[1]), attempt=2, output=[ord("q")]))  # begun again
    run.run()
    assert run.engine.statistics().retractions > 0
    for index, grammar in enumerate(grammars):
        assert re.fullmatch(grammar.text, text_of(run.records[f"u{index}", 0])), index
    assert compiler.threads == {"grammar": number}


def test_a_grammar_that_is_compiled_already_costs_no_turn() -> None:
    compiler = CountingCompiler()
    held = compiler.compiled(NUMBERS)
    run = NullEngineDriver(grammars=compiler)
    run.submit(sequence_request("a", PROMPT, params(NUMBERS)))
    assert "admitted" in [event.name for event in run.step().events]
    assert held is compiler.found(NUMBERS)


def test_a_grammar_that_is_not_held_and_not_among_the_latest_is_forgotten() -> None:
    compiler = CountingCompiler()
    compiler.compiled(NUMBERS)
    for index in range(MAX_CACHED):
        compiler.compiled(Grammar(GrammarKind.CHOICE, json.dumps([f"w{index}"])))
    assert compiler.found(NUMBERS) is None


def test_a_runner_without_a_compiler_takes_no_grammar() -> None:
    driver = EngineDriver(Engine(NullRunner(), EngineConfig(num_pages=64)))
    with pytest.raises(InvalidRequest, match="not supported by this model"):
        driver.submit(sequence_request("a", PROMPT, params(NUMBERS)))
    assert not driver.engine.has_work
