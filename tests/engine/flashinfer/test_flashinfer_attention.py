"""FlashInfer's backend without a GPU: what it tells the kernels is what the reference computes with."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

from busllm.engine.attention.flashinfer_attention import FlashInferAttention
from busllm.engine.attention.flashinfer_library import load_flashinfer
from busllm.engine.attention.paged_rows import decode_rows, pad_decode_rows, prefill_rows
from busllm.engine.attention.torch_attention import TorchAttention
from busllm.engine.graphs import RecordableAttention
from busllm.engine.kv_cache import KVShape
from busllm.errors import MissingPackage, ModelError
from tests.engine.flashinfer.rows import (
    DIM,
    HEADS,
    NUM_DECODE_ROWS,
    PAGES,
    ROWS,
    WINDOWS,
    Rows,
    batch_of,
    config,
    fill,
    queries_for,
)
from tests.engine.flashinfer.stand_in import SIGNATURES, StandInFlashInfer


def flashinfer(soft_cap: float | None = None) -> tuple[FlashInferAttention, StandInFlashInfer]:
    library = StandInFlashInfer()
    return FlashInferAttention(config(soft_cap), library, workspace_bytes=64), library


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
    ("rows", "num_decode_rows"),
    [(ROWS, NUM_DECODE_ROWS), (ROWS[:NUM_DECODE_ROWS], NUM_DECODE_ROWS), (ROWS[NUM_DECODE_ROWS:], 0), (ROWS, 0)],
    ids=["mixed", "decode", "prefill", "decode rows among the chunks"],
)
def test_every_layer_gives_what_the_reference_gives(rows: Rows, num_decode_rows: int, soft_cap: float | None) -> None:
    attention, _ = flashinfer(soft_cap)
    reference = TorchAttention(config(soft_cap))
    batch, tables = batch_of(rows, num_decode_rows)
    fill(tables, rows, attention, reference)
    queries = queries_for(batch.num_tokens)
    for each in (attention, reference):
        each.prepare(batch)
    for layer in range(len(WINDOWS)):
        assert (attention.attend(layer, queries) - reference.attend(layer, queries)).abs().max() < 2e-2


def test_queries_that_are_a_view_of_a_wider_tensor_are_read_right() -> None:
    attention, _ = flashinfer()
    batch, tables = batch_of(ROWS, NUM_DECODE_ROWS)
    fill(tables, ROWS, attention)
    attention.prepare(batch)
    queries = queries_for(batch.num_tokens)
    view = torch.cat((queries, torch.zeros(batch.num_tokens, 3, DIM).bfloat16()), dim=1)[:, :HEADS]
    assert torch.equal(attention.attend(0, view), attention.attend(0, queries))


def test_decode_rows_and_chunks_have_indices_of_their_own_from_zero() -> None:
    batch, _ = batch_of(ROWS, NUM_DECODE_ROWS)
    decode, prefill = decode_rows(batch), prefill_rows(batch)
    assert decode.qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert prefill.qo_indptr.tolist() == [0, 3, 12, 14]
    assert decode.indptr.tolist() == [0, 1, 3, 6, 14]
    assert prefill.indptr.tolist() == [0, 1, 5, 10]
    assert decode.last_page_len.tolist() == [1, 4, 1, 3]
    assert prefill.last_page_len.tolist() == [3, 1, 3]
    assert [*decode.indices, *prefill.indices] == batch.indices.tolist()


def test_rows_that_fill_a_step_up_read_one_token_of_the_scratch_page() -> None:
    batch, _ = batch_of(ROWS[:2], 2)
    padded = pad_decode_rows(decode_rows(batch), 4, scratch_page=PAGES)
    assert padded.indptr.tolist() == [0, 1, 3, 4, 5]
    assert padded.indices.tolist() == [*batch.indices.tolist(), PAGES, PAGES]
    assert padded.last_page_len.tolist() == [1, 4, 1, 1]


def test_one_plan_serves_all_layers_that_have_the_same_window() -> None:
    attention, library = flashinfer()
    batch, _ = batch_of(ROWS, NUM_DECODE_ROWS)
    attention.prepare(batch)
    assert len(library.wrappers) == 2 * len(set(WINDOWS))
    assert {wrapper.num_plans for wrapper in library.wrappers} == {1}
    assert {wrapper.planned["window_left"] for wrapper in library.wrappers} == {-1, 4, 0}


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_attention_of_a_fixed_size_gives_what_the_reference_gives_and_writes_to_no_page(num_rows: int) -> None:
    attention, _ = flashinfer()
    reference = TorchAttention(config())
    rows = ROWS[:num_rows]
    batch, tables = batch_of(rows, num_rows)
    fill(tables, rows, attention, reference)
    fixed = attention.recordable((1, 2, 4), max_row_pages=16)[4]
    fixed.prepare(batch)
    reference.prepare(batch)
    queries = queries_for(4)
    for layer in range(len(WINDOWS)):
        expected = reference.attend(layer, queries[:num_rows])
        assert (fixed.attend(layer, queries)[:num_rows] - expected).abs().max() < 2e-2
    assert fixed.cache is attention.cache


def test_fixed_sizes_share_the_places_that_their_kernels_read() -> None:
    attention, library = flashinfer()
    attention.recordable((1, 2, 4), max_row_pages=16)
    recorded = [wrapper for wrapper in library.wrappers if wrapper.made_with.get("use_cuda_graph")]
    assert len(recorded) == 3 * len(set(WINDOWS))
    for name in ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"):
        assert len({wrapper.made_with[name].data_ptr() for wrapper in recorded}) == 1
    assert all(len(wrapper.made_with["paged_kv_indices_buffer"]) == 4 * 16 for wrapper in recorded)


def test_the_scratch_page_lies_behind_the_pool() -> None:
    attention, _ = flashinfer()
    assert isinstance(attention, RecordableAttention)
    assert not isinstance(TorchAttention(config()), RecordableAttention)
    assert attention.scratch_page == PAGES
    assert attention.cache.shape.num_pages == PAGES + 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv": KVShape(4, 2, DIM, 8, 4, torch.float32, torch.device("cpu"))}, "the dtype is float32"),
        ({"kv": KVShape(4, 2, 80, 8, 4, torch.bfloat16, torch.device("cpu"))}, "the model's have 80"),
        ({"layer_sinks": (torch.zeros(HEADS),) * 4}, "attention sinks"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_the_reason(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        FlashInferAttention(config(**options), StandInFlashInfer())  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingPackage, match=r"busllm\[cuda\]"):
        load_flashinfer()


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize("class_name", sorted(SIGNATURES["0.7.4"]))
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_installed_package_takes_the_arguments_that_are_given(class_name: str, method: str) -> None:
    attention, library = flashinfer()
    batch, _ = batch_of(ROWS, NUM_DECODE_ROWS)
    attention.prepare(batch)
    made = next(wrapper for wrapper in library.wrappers if wrapper.name == class_name)
    given = {
        "__init__": {"float_workspace_buffer", *made.made_with},
        "plan": set(made.planned),
        "run": {"q", "paged_kv_cache", "out"},
    }
    real = getattr(load_flashinfer(), class_name)
    parameters = inspect.signature(getattr(real, method)).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = {**parameters, **inspect.signature(real._plan_impl).parameters}
    assert given[method] <= set(parameters)
