"""The forward pass: the same as `transformers`, and the same however a sequence is cut, paged and accompanied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.model_runner import ModelRunner
from busllm.errors import EngineError, ModelError
from busllm.model_store.files import ModelFiles
from busllm.model_store.resolve import resolve
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import SamplingParams
from busllm.testing.llama_reference import load_llama_reference, reference_logprobs
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.tiny_model import TINY_ARCHITECTURES, write_tiny_model
from tests.engine.logits import assert_logits_match
from tests.engine.reference import assert_matches, load_reference
from tests.engine.tiny import alone, assert_same_bits, driver, greedy, prompts

PROMPTS = prompts()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def solo(tiny: Path) -> list[DrivenSequence]:
    return alone(tiny, PROMPTS)


@pytest.fixture(scope="module")
def default_files() -> ModelFiles:
    try:
        return resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def default_runner(default_files: ModelFiles) -> ModelRunner:
    return load_runner(default_files, LoadConfig(device="cpu", dtype="float32"))


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_64_tokens_and_their_logits_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / architecture, architecture)
    sequences = (DrivenSequence(p, greedy(64), chunk_tokens=29, start_step=i) for i, p in enumerate(PROMPTS))
    assert_logits_match(directory, load_reference(directory), *sequences)


def test_the_default_model_answers_20_prompts_as_transformers_does(
    default_files: ModelFiles, default_runner: ModelRunner
) -> None:
    reference = load_llama_reference(default_files)
    texts = prompts((*range(1, 20), 140), vocab_size=49152)
    sequences = [DrivenSequence(prompt, greedy(8), chunk_tokens=64, start_step=i % 3) for i, prompt in enumerate(texts)]
    for sequence in PlanDriver(default_runner).run(*sequences):
        assert_matches(reference, sequence, 1e-3)


def test_the_default_model_gives_a_row_the_same_bits_alone_in_a_batch_and_in_chunks(
    default_runner: ModelRunner,
) -> None:
    one = PlanDriver(default_runner)
    texts = prompts((2, 21, 60, 140), vocab_size=49152)
    single = [one.run(DrivenSequence(prompt, greedy()))[0] for prompt in texts]
    batched = one.run(*(DrivenSequence(p, greedy(), chunk_tokens=17, start_step=i) for i, p in enumerate(texts)))
    assert_same_bits(batched, single)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(tiny: Path, dtype: str) -> None:
    single = alone(tiny, PROMPTS, dtype=dtype)
    both = driver(tiny, dtype=dtype)
    assert_same_bits(both.run(*(DrivenSequence(prompt, greedy()) for prompt in PROMPTS)), single)
    for chunk_tokens in (1, 7, 17, 64):
        sequences = (
            DrivenSequence(p, greedy(), chunk_tokens=chunk_tokens, start_step=3 * i) for i, p in enumerate(PROMPTS)
        )
        assert_same_bits(both.run(*sequences), single)


@pytest.mark.parametrize("page_tokens", [1, 2, 16, 64, 128])
def test_the_page_size_changes_no_bit(tiny: Path, solo: list[DrivenSequence], page_tokens: int) -> None:
    paged = driver(tiny, page_tokens=page_tokens)
    assert_same_bits(paged.run(*(DrivenSequence(p, greedy(), chunk_tokens=31) for p in PROMPTS)), solo)


@pytest.mark.parametrize("page_tokens", [24, 200])
def test_odd_page_sizes_give_the_same_tokens(tiny: Path, solo: list[DrivenSequence], page_tokens: int) -> None:
    paged = driver(tiny, page_tokens=page_tokens)
    for sequence, expected in zip(paged.run(*(DrivenSequence(p, greedy()) for p in PROMPTS)), solo, strict=True):
        assert sequence.output == expected.output


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_cached_prefix_changes_no_bit(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / architecture, architecture)
    one = driver(directory)
    prompt = PROMPTS[-1]
    (first,) = one.run(DrivenSequence(prompt, greedy()))
    for cached in (16, 64, 144):
        assert_same_bits(one.run(DrivenSequence(prompt, greedy(), cached=(first, cached))), [first])


def test_an_input_by_reference_is_the_token_that_was_sampled(tiny: Path, solo: list[DrivenSequence]) -> None:
    sequences = (DrivenSequence(p, greedy(), by_reference=True, start_step=i) for i, p in enumerate(PROMPTS))
    assert_same_bits(driver(tiny).run(*sequences), solo)


def test_slots_and_pages_that_were_used_before_leave_no_trace(tiny: Path, solo: list[DrivenSequence]) -> None:
    runner = load_runner(str(tiny), LoadConfig(device="cpu", dtype="float32"))
    few_slots = PlanDriver(runner, max_running=len(PROMPTS))
    for _ in range(3):
        assert_same_bits(few_slots.run(*(DrivenSequence(p, greedy()) for p in PROMPTS)), solo)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 23])
def test_prompt_log_probabilities_are_those_of_transformers(tiny: Path, chunk_tokens: int | None) -> None:
    reference = load_reference(tiny)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    sequences = driver(tiny).run(*(DrivenSequence(p, params, chunk_tokens=chunk_tokens) for p in PROMPTS))
    for sequence in sequences:
        expected = reference_logprobs(reference, sequence.prompt)
        assert len(sequence.prompt_logprobs) == len(sequence.prompt) - 1
        for position, entry in enumerate(sequence.prompt_logprobs, start=1):
            row = expected[position - 1]
            assert entry.chosen == pytest.approx(row[sequence.prompt[position]].item(), abs=1e-4)
            assert [token_id for token_id, _ in entry.top] == row.topk(2).indices.tolist()


def test_float16_follows_float32(tiny: Path, solo: list[DrivenSequence]) -> None:
    half = alone(tiny, PROMPTS, dtype="float16")
    differences = [
        abs(a.chosen - b.chosen)
        for one, other in zip(half, solo, strict=True)
        for a, b in zip(one.logprobs[:1], other.logprobs[:1], strict=True)
    ]
    assert max(differences) < 0.05


class TestRefusedPlans:
    """A plan that contradicts what the runner holds is an error, not a wrong token."""

    @pytest.fixture
    def runner(self, tiny: Path):  # type: ignore[no-untyped-def]
        runner = load_runner(str(tiny), LoadConfig(device="cpu", dtype="float32"))
        runner.allocate(num_pages=8, page_tokens=4, max_running=2, max_context_tokens=32)
        return runner

    @staticmethod
    def plan(number: int, *rows: PlanRow, opened: bool = False, pages: tuple[int, ...] = ()) -> StepPlan:
        return StepPlan(
            number=number,
            rows=rows,
            num_decode_rows=0,
            opened=(SlotOpened(0, SamplingParams(temperature=0.0), 0, b"\1\0\0\0" * 3, 3),) if opened else (),
            pages=(PagesAssigned(0, 0, pages),) if pages else (),
        )

    @staticmethod
    def row(start: int = 0, num_tokens: int = 3, from_step: int | None = None) -> PlanRow:
        token_ids = None if from_step is not None else b"\1\0\0\0" * num_tokens
        return PlanRow(0, start, num_tokens, token_ids, from_step, True)

    def test_a_row_of_a_slot_that_nobody_holds(self, runner) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(EngineError, match="no sequence holds it"):
            runner.launch(self.plan(0, self.row(), pages=(1,)))

    def test_a_row_without_pages(self, runner) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(EngineError, match="needs pages for 3 tokens"):
            runner.launch(self.plan(0, self.row(), opened=True))

    def test_a_page_that_does_not_exist(self, runner) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(EngineError, match="the pool has 8"):
            runner.launch(self.plan(0, self.row(), opened=True, pages=(8,)))

    def test_an_input_of_another_step_than_the_last(self, runner) -> None:  # type: ignore[no-untyped-def]
        runner.collect(runner.launch(self.plan(0, self.row(), opened=True, pages=(1, 2))))
        runner.collect(runner.launch(self.plan(1, self.row(3, 1, from_step=0))))
        with pytest.raises(EngineError, match="sampled"):
            runner.launch(self.plan(2, self.row(4, 1, from_step=0)))

    def test_an_input_of_another_position_than_the_last(self, runner) -> None:  # type: ignore[no-untyped-def]
        runner.collect(runner.launch(self.plan(0, self.row(), opened=True, pages=(1, 2))))
        with pytest.raises(EngineError, match="sampled"):
            runner.launch(self.plan(1, self.row(4, 1, from_step=0)))

    def test_a_slot_that_is_opened_twice(self, runner) -> None:  # type: ignore[no-untyped-def]
        runner.collect(runner.launch(self.plan(0, self.row(), opened=True, pages=(1,))))
        with pytest.raises(EngineError, match="while a sequence held it"):
            runner.launch(self.plan(1, opened=True))

    def test_a_step_that_is_collected_twice(self, runner) -> None:  # type: ignore[no-untyped-def]
        handle = runner.launch(self.plan(0, self.row(), opened=True, pages=(1,)))
        runner.collect(handle)
        with pytest.raises(EngineError, match="collected before"):
            runner.collect(handle)

    def test_a_runner_without_memory(self, runner) -> None:  # type: ignore[no-untyped-def]
        runner.close()
        with pytest.raises(EngineError, match="before `allocate`"):
            runner.launch(self.plan(0))


def test_the_kv_cache_costs_memory_only_as_it_fills(tiny: Path) -> None:
    runner = load_runner(str(tiny), LoadConfig(device="cpu", dtype="float32"))
    before = _resident_bytes()
    runner.allocate(num_pages=2**18, page_tokens=16, max_running=4, max_context_tokens=512)
    size = 2**18 * 16 * runner.model.kv_bytes_per_token
    assert size > 2**30
    assert _resident_bytes() - before < size / 10


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_threads_are_left_to_the_caller(tiny: Path) -> None:
    before = torch.get_num_threads()
    driver(tiny).run(DrivenSequence(PROMPTS[2], greedy()))
    assert torch.get_num_threads() == before
