"""Depth 1: the next step is planned and launched while one runs, and nobody looks at a result that is not there yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.config import EngineConfig
from busllm.engine.engine import Engine
from busllm.engine.model_runner import ModelRunner
from busllm.engine.runner import Runner
from busllm.engine.sequence import SequenceRequest
from busllm.model_store.tensor_part import WHOLE, TensorPart
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan
from busllm.sampling import SamplingParams
from busllm.testing.deferred_runner import DeferredRunner
from busllm.testing.random_runner import SMALL_LLAMA, random_runner
from tests.engine.tiny import prompts

TINY = {**SMALL_LLAMA, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2}
PROMPTS = prompts((1, 5, 15, 16, 17, 40, 60), vocab_size=512)
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=12, seed=1),
    SamplingParams(temperature=0.8, max_tokens=7, seed=2, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, max_tokens=10, seed=3, top_k=20, min_tokens=4, stop_token_ids=(5, 6, 7, 8)),
)


def small_runner() -> ModelRunner:
    return random_runner(TINY, TorchAttention, device=torch.device("cpu"), dtype=torch.float32)


def generate(runner: Runner, num_pages: int = 64) -> dict[str, list[int]]:
    """All prompts through an engine with few pages and short steps, so that sequences wait and are retracted."""
    engine = Engine(
        runner, EngineConfig(num_pages=num_pages, page_tokens=4, step_tokens=24, max_running=4, max_context_tokens=128)
    )
    for index, prompt in enumerate(PROMPTS):
        engine.submit(
            SequenceRequest(
                uid=f"u{index}",
                choice=0,
                attempt=1,
                prompt_ids=np.array(prompt, dtype=np.int32),
                output_ids=np.zeros(0, dtype=np.int32),
                params=PARAMS[index % len(PARAMS)],
                seed=index,
            )
        )
    outputs: dict[str, list[int]] = {f"u{index}": [] for index in range(len(PROMPTS))}
    while engine.has_work:
        for tokens in engine.step().tokens:
            outputs[tokens.uid] += tokens.token_ids
    engine.check_integrity()
    assert engine.statistics().pages_owned == 0
    return outputs


@pytest.mark.parametrize("num_pages", [64, 24], ids=["enough pages", "few pages"])
def test_a_late_device_gives_the_tokens_of_a_prompt_one(num_pages: int) -> None:
    late = DeferredRunner(small_runner())
    assert generate(late, num_pages) == generate(small_runner(), num_pages)
    assert late.most_launched == 2


class NothingWaits(TorchDispatchMode):
    """Stands between the host and the device `meta`, which has no values: whoever reads one fails by itself.

    What meta would let pass is a copy from the host for which a real device lets the host wait: one that says so, and
    one from memory that is not pinned, whatever it says.
    """

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self._pinned = pinned  # addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0] if args else None
        if (
            func.overloadpacket.__name__ in ("to", "_to_copy", "copy_")
            and _is_on(out, "meta")
            and _is_on(source, "cpu")
        ):
            assert kwargs.get("non_blocking") or True in args[1:], "a copy to the device that waits"
            assert source is not None
            assert not source.numel() or source.data_ptr() in self._pinned, "a copy that waits: its source is pageable"
        return out


def _is_on(value: Any, device: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device and value.dim() > 0


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> NothingWaits:
    """Pinned memory is what `staging.pinned` gives; it is kept, so that no other tensor gets its address."""
    addresses: set[int] = set()
    kept: list[torch.Tensor] = []

    def pinned(host: torch.Tensor, _: torch.device) -> torch.Tensor:
        kept.append(host.clone())
        addresses.add(kept[-1].data_ptr())
        return kept[-1]

    monkeypatch.setattr("busllm.engine.staging.pinned", pinned)
    return NothingWaits(addresses)


class NoWeights:
    """Shapes only."""

    device = torch.device("meta")

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart = WHOLE) -> torch.Tensor:
        return torch.empty(part.shape_of(shape), dtype=torch.bfloat16, device=self.device)


@pytest.fixture
def without_values() -> ModelRunner:
    runner = random_runner(TINY, TorchAttention, device=NoWeights.device, dtype=torch.bfloat16, weights=NoWeights())
    runner.allocate(num_pages=16, page_tokens=4, max_running=4, max_context_tokens=32)
    return runner


def plans(params: SamplingParams) -> tuple[StepPlan, StepPlan]:
    """A prompt and a chunk of another; then two decode rows, one of which names its input by step."""
    prompt = np.arange(5, dtype="<i4").tobytes()
    first = StepPlan(
        number=0,
        rows=(PlanRow(0, 0, 5, prompt, None, True), PlanRow(1, 0, 5, prompt, None, True)),
        num_decode_rows=0,
        opened=(SlotOpened(0, params, 7, prompt, 5), SlotOpened(1, params, 8, prompt, 5)),
        pages=(PagesAssigned(0, 0, (3, 1, 2)), PagesAssigned(1, 0, (4, 6, 9))),
        prompt_logprob_rows=(0,) if params.prompt_logprobs is not None else (),
    )
    second = StepPlan(
        number=1,
        rows=(PlanRow(0, 5, 1, None, 0, True), PlanRow(1, 5, 1, b"\1\0\0\0", None, True)),
        num_decode_rows=2,
    )
    return first, second


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
        SamplingParams(temperature=0.0, logit_bias=((3, 1.0), (4, -1.0)), min_tokens=3, stop_token_ids=(1, 2)),
    ],
    ids=["greedy", "log probabilities", "min-p", "top-k", "top-p", "penalties", "bias and min_tokens"],
)
def test_launching_reads_no_value_and_waits_for_no_copy(
    without_values: ModelRunner, params: SamplingParams, nothing_waits: NothingWaits
) -> None:
    with nothing_waits:
        for plan in plans(params):
            without_values.launch(plan)


def test_a_value_that_is_read_too_early_is_noticed(without_values: ModelRunner, nothing_waits: NothingWaits) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=without_values._device).tolist()
    with nothing_waits, torch.inference_mode(), pytest.raises(AssertionError, match="waits"):
        torch.ones(3).to("meta")
    with nothing_waits, pytest.raises(AssertionError, match="waits"):
        torch.ones(3).to("meta")
    with nothing_waits, pytest.raises(AssertionError, match="pageable"):
        torch.ones(3).to("meta", non_blocking=True)
