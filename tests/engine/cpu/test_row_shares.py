"""Rows that each core takes through all layers: the bits of linears that all cores share, in shares of equal work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.loader import LoadConfig, load_runner
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.testing.tiny_model import write_tiny_model
from tests.engine.cpu.test_forward import Quantization
from tests.engine.tiny import assert_same_bits, greedy, prompts

prepare_kernels()

from busllm.engine.cpu import cpu_decoder  # noqa: E402
from busllm.engine.cpu.cpu_attention import UNLIMITED  # noqa: E402
from busllm.engine.cpu.pieces import cut  # noqa: E402
from busllm.engine.cpu.row_shares import least_shared_rows, share_rows  # noqa: E402
from busllm.engine.cpu.threads import num_threads  # noqa: E402

PROMPTS = prompts((1, 2, 15, 16, 17, 33, 70, 130))
LONG_PROMPTS = prompts((300, 290, 90))
WORK = (3_500_000.0, 128.0, UNLIMITED)  # of the default model's linears and heads
Int64s = npt.NDArray[np.int64]


def run(directory: Path, quantization: Quantization, least: int | None) -> list[DrivenSequence]:
    """Prompts that begin one after the other, in chunks and whole, beside sequences that decode."""
    runner = load_runner(str(directory), LoadConfig(device="cpu", attention="cpu", quantization=quantization))
    runner._decoder.least_shared_rows = least  # type: ignore[attr-defined]
    chunks = (DrivenSequence(p, greedy(9), chunk_tokens=29, start_step=index) for index, p in enumerate(PROMPTS))
    driver = PlanDriver(runner)
    return [*driver.run(*chunks), *driver.run(*(DrivenSequence(p, greedy(3)) for p in LONG_PROMPTS))]


@pytest.mark.parametrize("num_shares", [1, 2, 3])
@pytest.mark.parametrize(
    ("architecture", "quantization", "overrides"),
    [
        ("llama", "int4", {"attention_bias": True, "mlp_bias": True}),
        ("llama", "none", {"head_dim": 20}),
        ("mistral", "int8", {"sliding_window": 40}),
        ("qwen3", "int8", {}),
        ("llama", "int8", {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 16}),
    ],
)
def test_every_step_has_the_bits_of_shared_outputs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    quantization: Quantization,
    overrides: dict[str, Any],
    num_shares: int,
) -> None:
    directory = write_tiny_model(tmp_path / architecture, architecture, **overrides)
    expected = run(directory, quantization, None)
    used = []

    def shares(items: Int64s, positions: Int64s, _: int, *work: Any) -> Any:
        used.append(len(positions))
        return share_rows(items, positions, num_shares, *work)

    monkeypatch.setattr(cpu_decoder, "share_rows", shares)
    assert_same_bits(run(directory, quantization, 1), expected)
    assert min(used) == 1
    assert max(used) > 600, "more than go through a layer at a time"


@pytest.mark.skipif(num_threads() == 1, reason="one core has all rows")
def test_steps_of_many_rows_are_shared_by_rows_unless_there_are_experts(tmp_path: Path) -> None:
    for architecture, expected in (("llama", least_shared_rows(num_threads())), ("qwen3-moe", None)):
        directory = write_tiny_model(tmp_path / architecture, architecture)
        decoder = load_runner(str(directory), LoadConfig(device="cpu", attention="cpu", quantization="int8"))._decoder
        assert decoder.least_shared_rows == expected  # type: ignore[attr-defined]


@pytest.mark.skipif(num_threads() == 1, reason="one core has all rows")
def test_a_start_loads_what_steps_of_many_rows_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, calls = cpu_decoder.hidden_states_by_rows, []

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        compiled(*arguments)

    monkeypatch.setattr(cpu_decoder, "hidden_states_by_rows", counted)
    directory = write_tiny_model(tmp_path / "llama", "llama")
    runner = load_runner(str(directory), LoadConfig(device="cpu", attention="cpu", quantization="int8"))
    assert calls, "else the first large step would compile, for longer than a step may last"
    versions = len(compiled.signatures)
    PlanDriver(runner).run(*(DrivenSequence(p, greedy(3)) for p in LONG_PROMPTS))
    assert len(compiled.signatures) == versions


def cut_rows(
    *rows: tuple[int, int], num_heads: int = 9, num_kv_heads: int = 3
) -> tuple[Int64s, Int64s, npt.NDArray[np.int32]]:
    """Pieces of attention, positions and borders of rows with (first position, tokens)."""
    borders = np.cumsum([0, *(tokens for _, tokens in rows)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + tokens) for start, tokens in rows])
    return cut(borders, positions, num_heads, num_kv_heads, 2), positions, borders


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (16, 1), (32, 1), (48, 2)])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 5)],
        [(150 + 7 * row, 1) for row in range(32)],
        [(20, 1)] * 31 + [(0, 110)],
        [(900, 1)] * 5 + [(64, 400), (0, 3), (512, 77)],
    ],
)
def test_each_row_is_in_one_share_with_all_its_pieces(
    rows: list[tuple[int, int]], num_shares: int, num_heads: int, num_kv_heads: int
) -> None:
    items, positions, borders = cut_rows(*rows, num_heads=num_heads, num_kv_heads=num_kv_heads)
    shared, first_items, first_rows, are_independent = share_rows(items, positions, num_shares, *WORK)
    assert (first_rows[0], first_rows[-1], first_items[0], first_items[-1]) == (0, len(positions), 0, len(items))
    assert (np.diff(first_rows) >= 0).all()
    assert sorted(shared.tolist()) == sorted(items.tolist())
    for share in range(num_shares):
        for *_, first, tokens in shared[first_items[share] : first_items[share + 1]]:
            assert first_rows[share] <= first
            assert first + tokens <= first_rows[share + 1]
    # Cores whose rows are whole sequences wait for nobody: all others must.
    assert are_independent == (set(first_rows) <= set(borders))


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([(159, 1)] * 32, 16),  # the same work each
        ([(159, 1)] * 30, 16),  # whole fours
        ([(0, 1)] * 24 + [(4000, 1)] * 8, 27),  # a long context counts
        ([(0, 256)], 136),  # later tokens see more
    ],
)
def test_shares_are_about_equally_much_work(rows: list[tuple[int, int]], first: int) -> None:
    items, positions, _ = cut_rows(*rows)
    _, _, first_rows, _ = share_rows(items, positions, 2, *WORK)
    assert first_rows.tolist() == [0, first, len(positions)]


def test_what_a_window_hides_is_no_work() -> None:
    items, positions, _ = cut_rows(*[(0, 1)] * 24, *[(4000, 1)] * 8)
    _, _, first_rows, _ = share_rows(items, positions, 2, *WORK[:2], 16)
    assert first_rows.tolist() == [0, 16, 32]
