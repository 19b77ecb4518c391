"""A split model answers as the whole one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.runner import Runner
from busllm.errors import ModelError
from busllm.plan import TokenLogprobs
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import EngineDriver, sequence_request
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.rank_threads import parallel_runner
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.tiny import driver, prompts

PROMPTS = prompts((1, 16, 33, 80, 130))
# With a vocabulary and an inner width that four do not divide.
FOUR_HEADS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 12,
    "vocab_size": 319,
    "intermediate_size": 94,
}
EVERYTHING = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2)


def in_one_batch(one: PlanDriver, params: SamplingParams = EVERYTHING) -> tuple[DrivenSequence, ...]:
    return one.run(*(DrivenSequence(p, params, seed=i, chunk_tokens=29, start_step=i) for i, p in enumerate(PROMPTS)))


def assert_alike(actual: tuple[DrivenSequence, ...], expected: tuple[DrivenSequence, ...]) -> None:
    """The same tokens, and log probabilities equal to 1e-4."""
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.output == theirs.output
        assert_near(mine.logprobs, theirs.logprobs)
        assert_near(mine.prompt_logprobs, theirs.prompt_logprobs)


def assert_near(actual: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [entry.chosen for entry in actual] == pytest.approx([entry.chosen for entry in expected], abs=1e-4)
    for mine, theirs in zip(actual, expected, strict=True):
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "llama3-rope", "qwen2", "qwen3", "qwen3-moe"])
def test_two_ranks_give_the_tokens_and_log_probabilities_of_one(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture)
    with parallel_runner(directory, 2) as runner:
        assert_alike(in_one_batch(PlanDriver(runner)), in_one_batch(driver(directory)))


def test_biases_of_every_linear_count_once(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", attention_bias=True, mlp_bias=True)
    with parallel_runner(directory, 2) as runner:
        assert_alike(in_one_batch(PlanDriver(runner)), in_one_batch(driver(directory)))


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_four_ranks_share_out_or_repeat_the_key_value_heads(tmp_path: Path, num_kv_heads: int) -> None:
    directory = write_tiny_model(tmp_path / "model", num_key_value_heads=num_kv_heads, **FOUR_HEADS)
    with parallel_runner(directory, 4) as runner:
        assert_alike(in_one_batch(PlanDriver(runner)), in_one_batch(driver(directory)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def split(tiny: Path) -> Iterator[Runner]:
    with parallel_runner(tiny, 2) as runner:
        yield runner


def test_every_rank_knows_what_was_drawn(tiny: Path, split: Runner) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=8)

    def run(one: PlanDriver) -> list[list[int]]:
        sequences = (DrivenSequence(p, params, seed=i, by_reference=True) for i, p in enumerate(PROMPTS))
        return [sequence.output for sequence in one.run(*sequences)]

    assert run(PlanDriver(split)) == run(driver(tiny))


def test_a_row_has_the_same_bits_alone_and_in_a_batch(split: Runner) -> None:
    one = PlanDriver(split)
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    single = [one.run(DrivenSequence(prompt, params))[0] for prompt in PROMPTS]
    batched = in_one_batch(one, params)
    assert [s.output for s in batched] == [s.output for s in single]
    assert [s.logprobs for s in batched] == [s.logprobs for s in single]


def a_busy_day(runner: Runner) -> EngineDriver:
    """Sampling, penalties, shared prefixes, retraction and an abort in one engine with too few pages."""
    one = EngineDriver(
        Engine(
            runner, EngineConfig(num_pages=32, page_tokens=4, step_tokens=32, max_running=8, expected_output_tokens=4)
        )
    )
    shared = PROMPTS[2][:24]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0},
        {"temperature": 0.0, "presence_penalty": 0.5, "prompt_logprobs": 2},
    ]
    for index in range(8):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **kinds[index % 4])
        one.submit(sequence_request(f"u{index}", [*shared, index], params, seed=index))
    for _ in range(12):
        one.step()
    one.engine.abort("u1")
    one.run()
    return one


def assert_the_same_day(actual: EngineDriver, expected: EngineDriver) -> None:
    """The mix was there, and every record has the same tokens and nearly the same log probabilities."""
    statistics = actual.engine.statistics()
    assert statistics.retractions > 0
    assert statistics.cached_prompt_tokens > 0
    assert statistics.pages_owned == 0
    assert actual.names("u1")[-1] == "aborted"
    for key, record in actual.records.items():
        theirs = expected.records[key]
        assert record.output == theirs.output
        assert_near(record.logprobs, theirs.logprobs)
        mine_of_prompt, theirs_of_prompt = (
            [entry for entry in each.prompt_logprobs or () if entry is not None] for each in (record, theirs)
        )
        assert_near(mine_of_prompt, theirs_of_prompt)
    assert any(record.prompt_logprobs for record in actual.records.values())


def whole(directory: Path) -> Runner:
    return load_runner(str(directory), LoadConfig(device="cpu", dtype="float32", attention="torch"))


def test_two_ranks_give_the_same_answers_with_prefixes_retraction_and_aborts(tiny: Path, split: Runner) -> None:
    assert_the_same_day(a_busy_day(split), a_busy_day(whole(tiny)))


def test_four_ranks_give_the_same_answers_with_prefixes_retraction_and_aborts(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", num_key_value_heads=2, **FOUR_HEADS)
    with parallel_runner(directory, 4) as runner:
        assert_the_same_day(a_busy_day(runner), a_busy_day(whole(directory)))


def test_a_part_of_the_model_holds_a_part_of_the_kv_cache(tiny: Path, split: Runner) -> None:
    whole = load_runner(str(tiny), LoadConfig(device="cpu", dtype="float32"))
    assert split.model.kv_bytes_per_token * 2 == whole.model.kv_bytes_per_token
    assert split.model.fingerprint == whole.model.fingerprint


def test_heads_that_cannot_be_shared_out_are_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match="6 attention heads"), parallel_runner(tiny, 4):
        pass
