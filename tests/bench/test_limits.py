"""What a step has to do at least: counted for a tiny model, the same on every machine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.compare.results import save
from bench.limits.__main__ import Peaks, measured_rows, steps, table, table_of_loads
from bench.limits.loads import LOADS
from bench.limits.work import Product, Rows, Work, work_of
from busllm.engine.cpu.instructions import detect_instructions
from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.cpu.packed_model import PackedModel, Packer, Quantization
from busllm.engine.models.config import ModelConfig, read_config
from busllm.model_store.weights import WeightTensor
from tests.bench.made import made

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 64, 96, 4, 2, 16, 128
QKV, OUTPUT = (HEADS + 2 * KV_HEADS) * DIM * HIDDEN, HIDDEN * HEADS * DIM
GATE_UP, DOWN, HEAD = 2 * INNER * HIDDEN, HIDDEN * INNER, VOCABULARY * HIDDEN
OUTPUTS = LAYERS * ((HEADS + 2 * KV_HEADS) * DIM + HIDDEN + 2 * INNER + HIDDEN) + VOCABULARY  # that have a bias


class NoTensors:
    """A checkpoint without tensors: what is missing is packed as zeros, which are as large as any numbers."""

    def has(self, name: str) -> bool:
        return False

    def find(self, name: str, shape: tuple[int, ...]) -> WeightTensor | None:
        return None

    def not_finite(self, name: str) -> None:
        raise AssertionError(name)


def config(**changed: object) -> ModelConfig:
    raw = {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return read_config(raw | changed)


def packed(model: ModelConfig, quantization: Quantization) -> PackedModel:
    return Packer(model, NoTensors(), quantization).pack()


def counted(quantization: Quantization, rows: list[Rows], **changed: object) -> Work:
    model = config(**changed)
    return work_of(model, packed(model, quantization), rows)


@pytest.mark.parametrize(
    ("quantization", "bits", "head_bits"),
    [("none", 16, 16), ("int8", 9, 9), ("int4", 5, 9)],  # with a scale, and for int4 a minimum, per 32 weights
)
def test_all_weights_are_read_once_however_many_rows_there_are(
    quantization: Quantization, bits: int, head_bits: int
) -> None:
    of_layers = LAYERS * (QKV + OUTPUT + GATE_UP + DOWN) * bits // 8
    expected = of_layers + HEAD * head_bits // 8 + 4 * OUTPUTS
    for rows in ([Rows(0, 9, 1)], [Rows(n, 9, 1) for n in range(7)], [Rows(0, 0, 33)]):
        assert counted(quantization, rows).weight_bytes == expected


def test_an_embedding_that_is_not_the_head_is_not_read_whole() -> None:
    rows = [Rows(0, 0, 1)]
    assert counted("int8", rows, tie_word_embeddings=False).weight_bytes == counted("int8", rows).weight_bytes


def test_weights_of_any_bits_are_multiplied_by_bytes_and_attention_by_bfloat16() -> None:
    rows = [Rows(0, 99, 1), Rows(1, 49, 1)]
    attention = 2 * LAYERS * HEADS * DIM * (100 + 50)
    linears = LAYERS * (QKV + OUTPUT + GATE_UP + DOWN) + HEAD
    for quantization in ("int4", "int8"):
        assert counted(quantization, rows).multiply_adds == {Product.INT8: 2 * linears, Product.BFLOAT16: attention}
    assert counted("none", rows).multiply_adds == {Product.BFLOAT16: 2 * linears + attention}


def test_a_prompt_chunk_goes_through_the_head_once_and_each_token_sees_those_before_it() -> None:
    work = counted("int8", [Rows(0, 10, 5)])
    linears = LAYERS * (QKV + OUTPUT + GATE_UP + DOWN)
    assert work.multiply_adds == {
        Product.INT8: 5 * linears + HEAD,
        Product.BFLOAT16: 2 * LAYERS * HEADS * DIM * (11 + 12 + 13 + 14 + 15),
    }


def test_of_experts_a_token_needs_those_it_goes_through() -> None:
    rows, qwen = [Rows(0, 99, 1), Rows(1, 49, 1)], {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": DIM}
    some = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
    work = counted("int8", rows, **qwen, **some)
    every = counted("int8", rows, **qwen, **some | {"num_experts": 2})
    assert work == every
    without = counted("int8", rows, **qwen, **some | {"num_experts": 0})
    more = work.multiply_adds[Product.INT8] - without.multiply_adds[Product.INT8]
    assert more == 2 * LAYERS * (GATE_UP + DOWN)  # one of the two takes the place of the dense layer


@pytest.mark.parametrize(
    ("window", "positions", "seen"), [(None, 100 + 25, 100 + sum(range(21, 26))), (8, 8 + 12, 8 + 5 * 8)]
)
def test_keys_and_values_of_each_seen_position_count_once(window: int | None, positions: int, seen: int) -> None:
    work = counted("int8", [Rows(0, 99, 1), Rows(1, 20, 5)], sliding_window=window)
    assert work.kv_bytes == positions * LAYERS * 2 * KV_HEADS * DIM * 2
    assert work.multiply_adds[Product.BFLOAT16] == 2 * LAYERS * HEADS * DIM * seen


def test_a_step_is_held_against_the_later_of_both_bounds() -> None:
    rates = dict.fromkeys(Product, 1e9)
    peaks = Peaks(num_cores=2, read_one=1e9, read_all=2e9, multiply_one=rates, multiply_all=rates)
    work = Work(
        weight_bytes=3_000_000, kv_bytes=1_000_000, multiply_adds={Product.INT8: 2_000_000, Product.BFLOAT16: 10**6}
    )
    assert math.isclose(peaks.memory_s(work), 0.002)
    assert math.isclose(peaks.arithmetic_s(work), 0.001 + 0.0005)
    *_, line = table(peaks, {"a step": work}, {"a step": 0.005})
    assert line == "| a step | 3.0 | 1.0 | 2.0 | 1.0 | 2.0 | 1.5 | 5.0 | 2.5 |"


def test_cores_that_do_less_together_than_alone_are_told_of() -> None:
    def peaks(together: float) -> Peaks:
        one, every = {Product.INT8: 1.0}, {Product.INT8: together}
        return Peaks(num_cores=2, read_one=1, read_all=1, multiply_one=one, multiply_all=every)

    assert [peaks(together).is_disturbed for together in (1.0, 1.7, 1.95)] == [True, True, False]


@pytest.mark.skipif(detect_instructions() is None, reason="this CPU lacks the instructions of the compiled kernels")
def test_reading_and_every_multiply_instruction_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_kernels()
    from bench.limits import peaks

    for name, value in {"_RUNS": 1, "_MULTIPLIES": 10_000, "_READ_BYTES": 2**20}.items():
        monkeypatch.setattr(peaks, name, value)
    assert peaks.read_bytes_per_s(1) > 0
    assert all(peaks.multiply_adds_per_s(kind, 1) > 0 for kind in Product)


def test_the_steps_are_those_of_the_page_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    lines = page.split("## How near the limits")[1].split("\n## ")[0].splitlines()
    found = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert [name for name in found if name in steps(160)] == list(steps(160))


def test_a_row_of_the_comparison_is_its_steps() -> None:
    """Seconds by hand: 1 for a step of decode rows, 2 for one with prompts."""

    def bound_s(rows: list[Rows]) -> float:
        return 2.0 if max(row.num_tokens for row in rows) > 1 else 1.0

    assert LOADS["c1"].at_best(bound_s) == 128 / (2 + 127)
    assert LOADS["c32"].at_best(bound_s) == 32 * 128 / (2 + 127)
    assert LOADS["c64-spread"].at_best(bound_s) == 64 * 125 / (2 + 124)
    assert LOADS["shared-cold"].at_best(bound_s) == 64 / (2 + 8 * 15)
    assert LOADS["shared-warm"].at_best(bound_s) == 64 / (8 * 16)
    assert [len(rows) for _, rows in LOADS["c8"].steps] == [8, 8]


def test_what_was_measured_stands_beside_what_is_possible(tmp_path: Path) -> None:
    save(made(), tmp_path / "comparison.json")
    measured = measured_rows(tmp_path / "comparison.json", "auto")
    assert measured == {"c1": 300.0, "c8": 1200.0}
    assert measured_rows(tmp_path / "comparison.json", "int8") == {}
    *_, c1, c32 = table_of_loads({"c1": 450.0, "c32": 4000.0}, measured)
    assert (c1, c32) == ("| c1 | tokens | 450 | 300 | 1.5 |", "| c32 | tokens | 4,000 | – | – |")
