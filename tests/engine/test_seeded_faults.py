"""The comparison with `transformers` notices the classic mistakes: each fault, put in on purpose, is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedModel

from busllm.engine.attention.protocol import AttentionConfig
from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.batch import RaggedBatch
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.model_runner import ModelRunner
from busllm.engine.runner import ModelInfo
from busllm.plan import PlanRow, StepPlan, StepResult
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.reference import assert_matches, load_reference
from tests.engine.tiny import greedy, prompts

PROMPTS = prompts((20, 40, 90))


class AlteredRunner:
    """Executes other plans than it is given."""

    def __init__(self, runner: ModelRunner, alter: Callable[[StepPlan], StepPlan]) -> None:
        self._runner = runner
        self._alter = alter

    @property
    def model(self) -> ModelInfo:
        return self._runner.model

    @property
    def depth(self) -> int:
        return self._runner.depth

    def allocate(self, **sizes: int) -> None:
        self._runner.allocate(**sizes)

    def prefault_memory(self) -> bool:
        return self._runner.prefault_memory()

    def launch(self, plan: StepPlan) -> int:
        return self._runner.launch(self._alter(plan))

    def collect(self, handle: int) -> StepResult:
        return self._runner.collect(handle)

    def close(self) -> None:
        self._runner.close()


def _rows(plan: StepPlan, alter: Callable[[PlanRow], PlanRow]) -> StepPlan:
    return msgspec.structs.replace(plan, rows=tuple(alter(row) for row in plan.rows))


def wrong_position(plan: StepPlan) -> StepPlan:
    """Decode rows are written one position too early."""
    return _rows(plan, lambda row: msgspec.structs.replace(row, start=row.start - 1) if row.num_tokens == 1 else row)


def lost_page(plan: StepPlan) -> StepPlan:
    """The second page of a sequence is replaced by another, once its keys are written."""
    pages = tuple(
        msgspec.structs.replace(entry, first=1, pages=(2047, *entry.pages)) if entry.first == 2 else entry
        for entry in plan.pages
    )
    return msgspec.structs.replace(plan, pages=pages)


def stale_input(plan: StepPlan) -> StepPlan:
    """Decode rows read the token before the last."""
    last = {}

    def alter(row: PlanRow) -> PlanRow:
        if row.num_tokens > 1:
            return row
        stale = np.asarray([last.get(row.slot, 7)], dtype="<i4").tobytes()
        last[row.slot] = int(np.frombuffer(row.token_ids or b"\0\0\0\0", dtype="<i4")[0])
        return msgspec.structs.replace(row, token_ids=stale)

    return _rows(plan, alter)


def foreign_page(plan: StepPlan) -> StepPlan:
    """The second sequence is given the first one's page as well."""
    first_pages = {entry.slot: entry.pages[0] for entry in plan.pages if entry.first == 0}
    pages = tuple(
        msgspec.structs.replace(entry, pages=(first_pages[0], *entry.pages[1:]))
        if entry.slot == 1 and entry.first == 0
        else entry
        for entry in plan.pages
    )
    return msgspec.structs.replace(plan, pages=pages)


class SeesTooMuch(TorchAttention):
    """A query sees the key after its own: in a prompt, the future."""

    def prepare(self, batch: RaggedBatch) -> None:
        future = RaggedBatch(**{**vars(batch), "positions": batch.positions + 1})
        super().prepare(future)


class SeesTooLittle(TorchAttention):
    """A window of one position less than the model's."""

    def __init__(self, config: AttentionConfig) -> None:
        windows = tuple(None if window is None else window - 1 for window in config.layer_windows)
        super().__init__(msgspec.structs.replace(config, layer_windows=windows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = write_tiny_model(tmp_path_factory.mktemp("faults") / "mistral", "mistral", sliding_window=32)
    return directory, load_reference(directory)


def _assert_noticed(runner: object, reference: PreTrainedModel) -> None:
    sequences = [DrivenSequence(prompt, greedy(16), chunk_tokens=32) for prompt in PROMPTS]
    PlanDriver(runner).run(*sequences)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        for sequence in sequences:
            assert_matches(reference, sequence, 1e-4)


def _load(directory: Path, attention: type[TorchAttention] = TorchAttention) -> ModelRunner:
    loaded = load_runner(str(directory), LoadConfig(device="cpu", dtype="float32"))
    return ModelRunner(loaded._decoder, loaded.model, device=loaded._device, dtype=loaded._dtype, attention=attention)


def test_without_a_fault_nothing_is_noticed(model: tuple[Path, PreTrainedModel]) -> None:
    directory, reference = model
    runner = AlteredRunner(_load(directory), lambda plan: plan)
    for sequence in PlanDriver(runner).run(*(DrivenSequence(p, greedy(16), chunk_tokens=32) for p in PROMPTS)):
        assert_matches(reference, sequence, 1e-4)


@pytest.mark.parametrize("fault", [wrong_position, lost_page, stale_input, foreign_page])
def test_a_fault_in_the_plan_is_noticed(
    model: tuple[Path, PreTrainedModel], fault: Callable[[StepPlan], StepPlan]
) -> None:
    directory, reference = model
    _assert_noticed(AlteredRunner(_load(directory), fault), reference)


@pytest.mark.parametrize("attention", [SeesTooMuch, SeesTooLittle])
def test_a_wrong_mask_is_noticed(model: tuple[Path, PreTrainedModel], attention: type[TorchAttention]) -> None:
    directory, reference = model
    _assert_noticed(_load(directory, attention), reference)


@pytest.mark.parametrize("overrides", [{"rope_theta": 10500.0}, {"rms_norm_eps": 1e-2}])
def test_a_wrong_number_in_the_configuration_is_noticed(
    tmp_path: Path, model: tuple[Path, PreTrainedModel], overrides: dict[str, float]
) -> None:
    _, reference = model
    settings: dict[str, object] = {"sliding_window": 32}
    if "rope_theta" in overrides:
        settings["rope_parameters"] = {"rope_type": "default", **overrides}
    else:
        settings |= overrides
    other = write_tiny_model(tmp_path / "mistral", "mistral", **settings)  # the same seed: the same weights
    _assert_noticed(_load(other), reference)
