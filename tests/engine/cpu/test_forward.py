"""The compiled forward pass: the reference's numbers on the same weights, however a sequence is cut and accompanied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

from busllm.engine.cpu.blocks import quantise
from busllm.engine.cpu.shapes import Format
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.model_runner import ModelRunner
from busllm.errors import EngineError, ModelError
from busllm.plan import StepPlan
from busllm.testing.llama_reference import reference_logprobs
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.cpu.weights import to_float32
from tests.engine.reference import load_reference
from tests.engine.test_seeded_faults import AlteredRunner, foreign_page, lost_page, stale_input, wrong_position
from tests.engine.tiny import assert_same_bits, greedy, prompts

Quantization = Literal["none", "int8", "int4"]
FORMATS = {"none": Format.BFLOAT16, "int8": Format.INT8, "int4": Format.INT4}
PROMPTS = prompts((1, 2, 15, 16, 17, 33, 70, 130))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny steps: on a busy machine, threads that wait for each other take seconds.

    `test_default_model.py` compares rows that several threads compute.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def load(directory: Path, quantization: Quantization = "int8") -> ModelRunner:
    return load_runner(str(directory), LoadConfig(device="cpu", attention="cpu", quantization=quantization))


def reference_of(directory: Path, quantization: Quantization) -> PreTrainedModel:
    """`transformers` in float32 with the weights that the format stands for."""
    model = load_reference(directory)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            is_outer = isinstance(module, torch.nn.Embedding) or name == "lm_head"
            kind = Format.INT8 if quantization == "int4" and is_outer else FORMATS[quantization]
            weight = module.weight.detach().numpy()
            module.weight.data = torch.from_numpy(to_float32(quantise(weight, kind), weight.shape[1]).copy())
    return model


def differences(model: PreTrainedModel, sequences: tuple[DrivenSequence, ...]) -> Iterator[float]:
    """Per generated token the largest of its log probability and those of the likeliest tokens beside it."""
    for sequence in sequences:
        expected = reference_logprobs(model, [*sequence.prompt, *sequence.output])[len(sequence.prompt) - 1 : -1]
        for row, token_id, entry in zip(expected, sequence.output, sequence.logprobs, strict=True):
            pairs = [(token_id, entry.chosen), *entry.top]
            yield max(abs(float(row[token]) - value) for token, value in pairs)


def largest_difference(model: PreTrainedModel, sequences: tuple[DrivenSequence, ...]) -> float:
    """Of all tokens."""
    return max(differences(model, sequences))


# What remains is the rounding of states to bytes or bfloat16, and of keys, values and attention weights.
TOLERANCE = {"none": 0.35, "int8": 0.3, "int4": 0.3}


@pytest.mark.parametrize("architecture", ["llama", "llama3-rope", "yarn-rope", "mistral", "qwen2", "qwen3"])
def test_every_family_gives_the_numbers_of_transformers(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / architecture, architecture)
    sequences = [DrivenSequence(p, greedy(6), chunk_tokens=29, start_step=index) for index, p in enumerate(PROMPTS)]
    done = PlanDriver(load(directory)).run(*sequences)
    assert largest_difference(reference_of(directory, "int8"), done) < TOLERANCE["int8"]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("overrides", [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 20}])
def test_every_format_gives_the_numbers_of_its_weights(
    tmp_path: Path, quantization: Quantization, overrides: dict[str, object]
) -> None:
    directory = write_tiny_model(tmp_path / "llama", "llama", **overrides)
    done = PlanDriver(load(directory, quantization)).run(*(DrivenSequence(p, greedy(6)) for p in PROMPTS))
    assert largest_difference(reference_of(directory, quantization), done) < TOLERANCE[quantization]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("compiled") / "mistral", "mistral", sliding_window=40)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(tiny: Path, quantization: Quantization) -> None:
    driver = PlanDriver(load(tiny, quantization))
    single = [driver.run(DrivenSequence(prompt, greedy()))[0] for prompt in PROMPTS]
    assert_same_bits(driver.run(*(DrivenSequence(prompt, greedy()) for prompt in PROMPTS)), single)
    for chunk_tokens in (1, 7, 17, 64):
        sequences = (
            DrivenSequence(p, greedy(), chunk_tokens=chunk_tokens, start_step=3 * i) for i, p in enumerate(PROMPTS)
        )
        assert_same_bits(driver.run(*sequences), single)


@pytest.mark.parametrize("page_tokens", [32, 64])
def test_the_page_size_changes_no_bit(tiny: Path, page_tokens: int) -> None:
    runs = [
        PlanDriver(load(tiny), page_tokens=size).run(*(DrivenSequence(p, greedy(), chunk_tokens=31) for p in PROMPTS))
        for size in (16, page_tokens)
    ]
    assert_same_bits(*runs)


def test_a_cached_prefix_and_inputs_by_reference_change_no_bit(tiny: Path) -> None:
    driver = PlanDriver(load(tiny))
    prompt = PROMPTS[-1]
    (first,) = driver.run(DrivenSequence(prompt, greedy()))
    for cached in (16, 64, 128):
        assert_same_bits(driver.run(DrivenSequence(prompt, greedy(), cached=(first, cached))), [first])
    assert_same_bits(driver.run(DrivenSequence(prompt, greedy(), by_reference=True)), [first])


def test_prompt_log_probabilities_are_those_of_transformers(tiny: Path) -> None:
    from busllm.sampling import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    model = reference_of(tiny, "int8")
    for sequence in PlanDriver(load(tiny)).run(*(DrivenSequence(p, params, chunk_tokens=23) for p in PROMPTS)):
        expected = reference_logprobs(model, sequence.prompt)
        for position, entry in enumerate(sequence.prompt_logprobs, start=1):
            assert entry.chosen == pytest.approx(float(expected[position - 1][sequence.prompt[position]]), abs=0.15)


@pytest.mark.parametrize("fault", [None, wrong_position, lost_page, stale_input, foreign_page])
def test_a_fault_in_the_plan_is_noticed(tiny: Path, fault: Callable[[StepPlan], StepPlan] | None) -> None:
    runner = AlteredRunner(load(tiny), fault or (lambda plan: plan))
    sequences = [DrivenSequence(p, greedy(12), chunk_tokens=32) for p in prompts((20, 40, 90))]
    difference = largest_difference(reference_of(tiny, "int8"), PlanDriver(runner).run(*sequences))
    assert (difference > 4 * TOLERANCE["int8"]) == (fault is not None)


@pytest.mark.parametrize("overrides", [{"rope_theta": 13000.0}, {"sliding_window": 39}, {"rms_norm_eps": 5e-2}])
def test_a_wrong_number_in_the_configuration_is_noticed(
    tmp_path: Path, tiny: Path, overrides: dict[str, object]
) -> None:
    settings: dict[str, object] = {"sliding_window": 40} | overrides
    if "rope_theta" in settings:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    other = write_tiny_model(tmp_path / "mistral", "mistral", **settings)  # the same seed: the same weights
    sequences = [DrivenSequence(p, greedy(12), chunk_tokens=32) for p in prompts((20, 40, 90))]
    done = PlanDriver(load(other)).run(*sequences)
    assert largest_difference(reference_of(tiny, "int8"), done) > TOLERANCE["int8"]


def test_a_token_beyond_the_vocabulary_is_refused(tiny: Path) -> None:
    with pytest.raises(EngineError, match="not below 320"):
        PlanDriver(load(tiny)).run(DrivenSequence([5, 320], greedy()))


def test_weights_that_do_not_match_the_configuration_are_refused_by_name(tmp_path: Path) -> None:
    import json

    directory = write_tiny_model(tmp_path / "llama", "llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ModelError, match=r"gate_proj.weight is 96 x 48 and should be 128 x 48"):
        load(directory)
