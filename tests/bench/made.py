"""A comparison with easy numbers, as if it had been measured."""

from __future__ import annotations

from bench.compare.results import Comparison, Machine, RowFacts, RowResult, ServerFacts, Visit
from bench.compare.rows import Figure, chosen_rows

KEYS = ("start", "c1", "c8", "c8-sampled", "arriving")


def facts(name: str, *, is_ours: bool = False, max_sequence_tokens: int = 65536) -> ServerFacts:
    """A server."""
    return ServerFacts(
        name=name,
        version="1",
        weights="<int4>",
        kv_tokens=65536,
        max_sequence_tokens=max_sequence_tokens,
        settings="the usual",
        is_ours=is_ours,
    )


def rows(speed: float) -> dict[str, RowResult]:
    """A round of a server that is so many times as fast as the slowest."""
    return {
        "start": RowResult(figures={Figure.START.value: 3.0 / speed}),
        "c1": RowResult(figures={Figure.OUTPUT.value: 100.0 * speed, Figure.TTFT_P50.value: 50.0 / speed}),
        "c8": RowResult(figures={Figure.OUTPUT.value: 400.0 * speed}, other_busy=0.05),
        "c8-sampled": RowResult(figures={Figure.OUTPUT.value: 380.0 * speed}, other_busy=0.5),
        "arriving": RowResult(figures={Figure.STREAMS_P99.value: 900.0 / speed}),
    }


def made() -> Comparison:
    """Three rounds of ours, of llama and of vllm; llama cannot do one row, and vllm did not start in the last round."""
    visits = []
    for number in (1, 2, 3):
        ours, llama, vllm = rows(2.0 + 0.5 * number), rows(1.0 + 0.1 * number), rows(1.0)
        llama["arriving"] = RowResult(left_out="needs a sequence of 4,096 tokens")
        visits += [
            Visit(server="busllm-auto", round_number=number, seed=number, load_before=0.1, rows=ours),
            Visit(server="llama", round_number=number, seed=number, load_before=0.2, rows=llama),
            Visit(server="vllm", round_number=number, seed=number, load_before=0.3, rows=vllm)
            if number < 3
            else Visit(server="vllm", round_number=number, seed=number, load_before=0.3, error="it ended & said <why>"),
        ]
    return Comparison(
        began_at="2026-01-01T00:00:00+00:00",
        model="smollm2-135m",
        machine=Machine(
            cpu="A <CPU>",
            flags=("avx2", "avx512f"),
            num_cores=2,
            memory_bytes=8 * 2**30,
            kernel="6.1",
            versions={"python": "3.11"},
            commit="abc+",
        ),
        servers=[facts("busllm-auto", is_ours=True), facts("llama"), facts("vllm")],
        rows=[RowFacts(key=row.key, title=row.title) for row in chosen_rows(KEYS)],
        visits=visits,
    )
