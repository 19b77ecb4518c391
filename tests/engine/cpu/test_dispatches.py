"""What a step is made of, counted: calls of compiled code and of torch are as many for one row as for many.

Each costs microseconds of Python between two steps, whatever the machine. A number here that grows is a step that got
slower for everyone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from busllm.engine.config import EngineConfig
from busllm.engine.engine import Engine
from busllm.engine.loader import LoadConfig, load_runner
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import sequence_request
from busllm.testing.tiny_model import write_tiny_model

PROMPT_TOKENS = 20
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
# Between numpy and torch, without a look at the numbers.
CONVERSIONS = {"lift_fresh", "resolve_conj", "resolve_neg", "detach", "to", "slice", "select", "view"}


class TorchCalls(TorchDispatchMode):
    """Counts torch's operations, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Counted(Engine):
    """An engine that counts what one step calls."""

    compiled: Counter[str]
    num_conversions: int

    def count(self) -> tuple[Counter[str], Counter[str]]:
        """Compiled functions and operations of torch that touch numbers, by name, in the next step."""
        self.compiled.clear()
        with TorchCalls() as torch_calls:
            self.step()
        self.num_conversions = sum(torch_calls.counts[name] for name in CONVERSIONS)
        touching = {name: count for name, count in torch_calls.counts.items() if name not in CONVERSIONS}
        return Counter(self.compiled), Counter(touching)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    runner = load_runner(str(model), LoadConfig(device="cpu", attention="cpu", quantization="int8"))
    from busllm.engine import compiled_scans  # kernels must be prepared before they are imported
    from busllm.engine.cpu import cpu_attention, cpu_decoder
    from busllm.engine.cpu.threads import ThreadChoice

    # How much of the layers one core does first is tried out, and makes two calls of one.
    monkeypatch.setattr(ThreadChoice, "choose", lambda self, num_rows: 0.0)
    engine = Counted(runner, EngineConfig(num_pages=200, step_tokens=1024, prefix_cache=False))
    engine.compiled = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            engine.compiled[name] += 1
            return function(*arguments)

        return call

    for module, name in (
        (cpu_attention, "cut"),
        (cpu_decoder, "hidden_states"),
        (cpu_decoder, "share_rows"),
        (cpu_decoder, "hidden_states_by_rows"),
        (cpu_decoder, "logits"),
        (compiled_scans, "find_largest"),
        (compiled_scans, "draw_rows"),
    ):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    yield engine
    engine.close()


def submit(engine: Engine, count: int, **params: Any) -> None:
    for number in range(count):
        prompt = [1 + (7 * number + place) % 200 for place in range(PROMPT_TOKENS)]
        settings = SamplingParams(max_tokens=50, ignore_eos=True, **params)
        engine.submit(sequence_request(f"{params['temperature']}-{number}", prompt, settings))


def layers(num_rows: int) -> dict[str, int]:
    """What computes so many rows."""
    from busllm.engine.cpu.row_shares import least_shared_rows
    from busllm.engine.cpu.threads import num_threads

    if num_threads() > 1 and num_rows >= least_shared_rows(num_threads()):
        return {"share_rows": 1, "hidden_states_by_rows": 1}
    return {"hidden_states": 1}


@pytest.mark.parametrize("num_rows", [1, 32])
def test_a_greedy_decode_step(engine: Counted, num_rows: int) -> None:
    submit(engine, num_rows, **GREEDY)
    engine.step()
    engine.step()
    compiled, torch_calls = engine.count()
    assert compiled == {"cut": 1, **layers(num_rows), "logits": 1, "find_largest": 1}
    assert torch_calls == {"index_put_": 1}, "the slots learn their tokens; nothing else is torch's"
    assert engine.num_conversions <= 34


@pytest.mark.parametrize("num_rows", [1, 32])
def test_a_sampled_decode_step(engine: Counted, num_rows: int) -> None:
    submit(engine, num_rows, **SAMPLED)
    engine.step()
    engine.step()
    compiled, torch_calls = engine.count()
    assert compiled == {"cut": 1, **layers(num_rows), "logits": 1, "find_largest": 1, "draw_rows": 1}
    assert torch_calls == {"index_put_": 1}
    assert engine.num_conversions <= 39


def test_prompts_beside_decode_rows(engine: Counted) -> None:
    """All rows of a step go through the layers at once; who has a last token is picked out of them."""
    submit(engine, 8, **GREEDY)
    engine.step()
    submit(engine, 8, **SAMPLED)
    compiled, torch_calls = engine.count()
    assert compiled == {"cut": 1, **layers(8 + 8 * PROMPT_TOKENS), "logits": 1, "find_largest": 2, "draw_rows": 1}, (
        "the largest is asked for to see numbers, and for the greedy rows"
    )
    # The last hidden states, the sampled rows and their ids; eight slots are opened with their prompts.
    assert torch_calls == {"index": 2, "index_put_": 2, "copy_": 8}
