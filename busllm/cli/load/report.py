"""The figures of a load.

Owns: `Report` and what each figure means.
Does not know: how it is printed (`cli/bench.py`) or drawn (`picture.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from busllm.cli.load.arrival import pauses_meanwhile_ms
from busllm.cli.load.measured import Measured
from busllm.cli.load.run import Run
from busllm.cli.load.workload import Workload

MAX_ERRORS = 5
BUSY_LIMIT = 0.7  # share of one core above which this program may have slowed what it measured


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds; the p-th percentile of n values is the smallest with at least p percent of them at or below it."""

    p50: float
    p90: float
    p99: float
    max: float


class ArrivalReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a long prompt saw that arrived among the others, and what they saw meanwhile.

    Attributes:
        input_tokens, output_tokens: as the server counts; None when it did not say.
        ttft_ms, duration_ms: from asking for the connection; None when it failed.
        streams_inter_token_ms: of the others, while it was under way; None when they had no text then.
        num_pauses: how many that were.
        error: why it failed; None when it did not.
    """

    input_tokens: int | None
    output_tokens: int | None
    ttft_ms: float | None
    duration_ms: float | None
    streams_inter_token_ms: Percentiles | None
    num_pauses: int
    error: str | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients saw.

    Attributes:
        url, model, concurrency, workload: what was run.
        ok, failed: requests.
        wall_s: from the first request to the end of the last.
        input_tokens, output_tokens: of the requests that are ok, as the server counts, else pieces of text.
        output_tokens_per_s, total_tokens_per_s, requests_per_s: over `wall_s`.
        ttft_ms: from asking for the connection to the first text; None when no request is ok.
        inter_token_ms: between two pieces of text of one request; a server that sends several tokens in one piece has
            fewer and longer ones. None when no request has two.
        generator_busy: CPU time of this program per second.
        errors: how often each, the most frequent.
        arrival: the long prompt that arrived among the others; None when there was none. It is counted nowhere else,
            but as a failed request when it failed.
    """

    url: str
    model: str
    concurrency: int
    workload: Workload
    ok: int
    failed: int
    wall_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    generator_busy: float
    errors: dict[str, int]
    arrival: ArrivalReport | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether this program itself may have been the bottleneck."""
        return self.generator_busy > BUSY_LIMIT


def ttfts_ms(run: Run) -> list[float]:
    """Time to the first text of every request that is ok, in ascending order."""
    return sorted((one.text_s[0] - one.began_s) * 1e3 for one in run.measured if one.error is None and one.text_s)


def inter_tokens_ms(run: Run) -> list[float]:
    """Time between two pieces of text of every request that is ok, in ascending order."""
    good = [one.text_s for one in run.measured if one.error is None]
    return sorted((late - early) * 1e3 for times in good for early, late in pairwise(times))


def report(run: Run, *, url: str, model: str, concurrency: int, workload: Workload) -> Report:
    """Makes the figures of a run."""
    good = [one for one in run.measured if one.error is None]
    all_sent = [*run.measured] if run.arrived is None else [*run.measured, run.arrived]
    wall_s = run.ended_s - run.began_s
    output = sum(len(one.text_s) if one.completion_tokens is None else one.completion_tokens for one in good)
    prompt = sum(one.prompt_tokens or 0 for one in good)
    errors = Counter(one.error for one in all_sent if one.error is not None)
    return Report(
        url=url,
        model=model,
        concurrency=concurrency,
        workload=workload,
        ok=len(good),
        failed=errors.total(),
        wall_s=round(wall_s, 3),
        input_tokens=prompt,
        output_tokens=output,
        output_tokens_per_s=round(output / wall_s, 1),
        total_tokens_per_s=round((prompt + output) / wall_s, 1),
        requests_per_s=round(len(good) / wall_s, 2),
        ttft_ms=percentiles(ttfts_ms(run)),
        inter_token_ms=percentiles(inter_tokens_ms(run)),
        generator_busy=round(run.busy_s / wall_s, 3),
        errors=dict(errors.most_common(MAX_ERRORS)),
        arrival=None if run.arrived is None else _arrival_report(run.arrived, run.measured),
    )


def _arrival_report(arrived: Measured, streams: Sequence[Measured]) -> ArrivalReport:
    pauses_ms = pauses_meanwhile_ms(arrived, streams)
    has_text = arrived.error is None and bool(arrived.text_s)
    return ArrivalReport(
        input_tokens=arrived.prompt_tokens,
        output_tokens=arrived.completion_tokens,
        ttft_ms=round((arrived.text_s[0] - arrived.began_s) * 1e3, 2) if has_text else None,
        duration_ms=round((arrived.ended_s - arrived.began_s) * 1e3, 2) if arrived.error is None else None,
        streams_inter_token_ms=percentiles(pauses_ms),
        num_pauses=len(pauses_ms),
        error=arrived.error,
    )


def percentiles(ascending: Sequence[float]) -> Percentiles | None:
    """Percentiles of values in ascending order; None when there is none."""
    if not ascending:
        return None

    def percentile(percent: int) -> float:
        return round(ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)], 2)

    return Percentiles(percentile(50), percentile(90), percentile(99), percentile(100))
