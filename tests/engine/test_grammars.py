"""Sequences under a grammar: in any company, after any interruption, the same answer, and always one that it allows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.null import NULL_EOS_TOKEN_ID
from busllm.engine.sequence import FinishReason
from busllm.errors import InvalidRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.resolve import resolve
from busllm.sampling import Grammar
from busllm.testing.engine_driver import EngineDriver, Record, sequence_request
from busllm.testing.null_engine import NullEngineDriver, null_grammars
from busllm.testing.tiny_model import write_tiny_model
from busllm.text.vocabulary import load_vocabulary
from tests.engine.grammar_cases import BROKEN, NUMBERS, OPEN_END, PERSON, PROMPT, params, text_of


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
        compiler = null_grammars()
        held = [compiler.compiled(grammar) for grammar in grammars if grammar is not None]  # so that none has to wait
        run = NullEngineDriver(depth, eos_one_in=10, grammars=compiler, num_pages=24, expected_output_tokens=0)
        for number, grammar in enumerate(grammars):
            run.submit(sequence_request(f"u{number}", PROMPT, params(grammar, max_tokens=36), seed=number))
        run.run()
        assert held
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
