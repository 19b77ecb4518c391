"""The table: which loads there are, what is read off each, and what is to be reached.

Owns: rows, figures and goals.
Does not know: servers, and how a load is made (`client.py`).
Next on the path: `rounds.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from busllm.cli.load.workload import Workload


class Figure(Enum):
    """One number that a row has for each server and round. The value is its name in the JSON."""

    OUTPUT = "output_tokens_per_s"
    REQUESTS = "requests_per_s"
    TTFT_P50 = "ttft_p50_ms"
    TTFT_P99 = "ttft_p99_ms"
    INTER_TOKEN_P50 = "inter_token_p50_ms"
    INTER_TOKEN_P99 = "inter_token_p99_ms"
    STREAMS_P99 = "streams_inter_token_p99_ms"
    LONG_TTFT = "long_prompt_ttft_ms"
    CPU = "cpu_ms_per_token"
    START = "start_to_first_token_s"
    PSS = "pss_mib"

    @property
    def title(self) -> str:
        """For people."""
        return _TITLES[self][0]

    @property
    def unit(self) -> str:
        """For people."""
        return _TITLES[self][1]

    @property
    def more_is_better(self) -> bool:
        """Whether a larger number is the better one."""
        return self in (Figure.OUTPUT, Figure.REQUESTS)


_TITLES = {
    Figure.OUTPUT: ("output", "tok/s"),
    Figure.REQUESTS: ("requests", "/s"),
    Figure.TTFT_P50: ("time to first text, p50", "ms"),
    Figure.TTFT_P99: ("time to first text, p99", "ms"),
    Figure.INTER_TOKEN_P50: ("between two texts, p50", "ms"),
    Figure.INTER_TOKEN_P99: ("between two texts, p99", "ms"),
    Figure.STREAMS_P99: ("between two texts of the streams, p99", "ms"),
    Figure.LONG_TTFT: ("the long prompt's first text", "ms"),
    Figure.CPU: ("CPU time", "ms/token"),
    Figure.START: ("start to first token", "s"),
    Figure.PSS: ("memory of all processes (PSS)", "MiB"),
}


class Goal(msgspec.Struct, frozen=True):
    """What is to be reached in one figure.

    Attributes:
        figure: which.
        limit, aim: of the ratio to what it is compared with, or of the figure itself: at least so much where more is
            better, at most where less is.
        peer: name of the server it is compared with.
        row: key of another row of the same server that it is compared with. Neither: the figure itself counts.
    """

    figure: Figure
    limit: float
    aim: float
    peer: str | None = None
    row: str | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    Attributes:
        key: its short name.
        title: for people.
        workload: what is sent; None = nothing is, something is read off the server.
        concurrency: requests at the same time.
        figures: what is read off, the most important first.
        goals: what is to be reached.
        after: key of the row that must run just before, on the same server.
        requests_of: key of another row whose very requests these are.
        is_offline: whether `busllm.LLM` computes them in a process of its own while the server waits; other servers
            leave the row out.
    """

    key: str
    title: str
    workload: Workload | None = None
    concurrency: int = 1
    figures: tuple[Figure, ...]
    goals: tuple[Goal, ...] = ()
    after: str | None = None
    requests_of: str | None = None
    is_offline: bool = False

    @property
    def longest_words(self) -> int:
        """Words and tokens of the longest prompt and its answer: about the tokens that a sequence must have."""
        work = self.workload
        if work is None:
            return 0
        usual = work.shared_words + work.input_words + work.output_tokens
        return max(usual, work.arriving_words + work.arriving_output_tokens if work.arriving_words is not None else 0)


_BETWEEN_TEXTS = (Figure.INTER_TOKEN_P50, Figure.INTER_TOKEN_P99)
_STREAMED = (Figure.OUTPUT, Figure.TTFT_P50, Figure.TTFT_P99, *_BETWEEN_TEXTS, Figure.CPU)
_SHARED = (Figure.REQUESTS, Figure.TTFT_P50, Figure.TTFT_P99, *_BETWEEN_TEXTS, Figure.CPU)
_PLAIN = Workload(input_words=100, output_tokens=128)
_SAMPLED = msgspec.structs.replace(_PLAIN, temperature=0.8, top_p=0.95)
_PREFIXED = Workload(requests=64, input_words=100, output_tokens=16, shared_words=1000)


def _clients(count: int, requests: int, *goals: Goal) -> Row:
    return Row(
        key=f"c{count}",
        title=f"{count} client{'s' if count > 1 else ''}, {requests} requests, 100 words in, 128 tokens out",
        workload=msgspec.structs.replace(_PLAIN, requests=requests),
        concurrency=count,
        figures=_STREAMED,
        goals=goals,
    )


def _sampled(count: int, requests: int) -> Row:
    return Row(
        key=f"c{count}-sampled",
        title=f"{count} client{'s' if count > 1 else ''}, {requests} requests, temperature 0.8, top_p 0.95",
        workload=msgspec.structs.replace(_SAMPLED, requests=requests),
        concurrency=count,
        figures=_STREAMED,
        goals=(Goal(Figure.OUTPUT, 0.90, 0.97, row=f"c{count}"),),
    )


ROWS = (
    Row(
        key="start",
        title="Start to first token, model cached",
        figures=(Figure.START,),
        goals=(Goal(Figure.START, 4.0, 2.0),),
    ),
    _clients(1, 8, Goal(Figure.OUTPUT, 1.5, 2.2, peer="llama"), Goal(Figure.TTFT_P50, 1.0, 1.0, peer="vllm")),
    _clients(8, 32, Goal(Figure.OUTPUT, 1.6, 2.2, peer="vllm")),
    _clients(32, 64, Goal(Figure.OUTPUT, 1.25, 1.6, peer="vllm"), Goal(Figure.OUTPUT, 0.92, 0.92, row="offline")),
    Row(
        key="memory",
        title="Memory after 32 clients, equal KV capacity",
        figures=(Figure.PSS,),
        goals=(Goal(Figure.PSS, 1.0, 0.5, peer="vllm"),),
        after="c32",
    ),
    Row(
        key="offline",
        title="The requests of 32 clients without HTTP and bus: busllm.LLM in a process of its own, 32 at a time",
        workload=msgspec.structs.replace(_PLAIN, requests=64),
        concurrency=32,
        figures=(Figure.OUTPUT, Figure.CPU),
        requests_of="c32",
        is_offline=True,
    ),
    _sampled(1, 8),
    _sampled(8, 32),
    _sampled(32, 64),
    Row(
        key="c64-spread",
        title="64 clients, 128 requests, 100 to 400 words in, 50 to 200 tokens out",
        workload=Workload(requests=128, input_words=400, output_tokens=200, spread=True),
        concurrency=64,
        figures=_STREAMED,
        goals=(Goal(Figure.OUTPUT, 1.2, 1.5, peer="vllm"), Goal(Figure.TTFT_P99, 1.0, 1.0, peer="vllm")),
    ),
    Row(
        key="shared-cold",
        title="8 clients, 64 requests, 1,000 words shared, 16 tokens out; first time",
        workload=_PREFIXED,
        concurrency=8,
        figures=_SHARED,
    ),
    Row(
        key="shared-warm",
        title="The same requests again",
        workload=_PREFIXED,
        concurrency=8,
        figures=_SHARED,
        goals=(Goal(Figure.REQUESTS, 1.7, 2.5, peer="vllm"),),
        after="shared-cold",
        requests_of="shared-cold",
    ),
    Row(
        key="arriving",
        title="A prompt of 4,000 words (96 tokens out) arrives among 8 streams",
        workload=Workload(requests=16, input_words=100, output_tokens=384, arriving_words=4000),
        concurrency=8,
        figures=(Figure.STREAMS_P99, Figure.LONG_TTFT, Figure.OUTPUT, *_BETWEEN_TEXTS, Figure.CPU),
        goals=(Goal(Figure.STREAMS_P99, 0.5, 0.25, peer="vllm"),),
    ),
)

_QUICK_SHARE = 4


def chosen_rows(keys: Iterable[str]) -> list[Row]:
    """The rows of these keys in the table's order, with those that they must come after or have their requests of.

    Raises:
        KeyError: there is no such row.
    """
    by_key = {row.key: row for row in ROWS}
    wanted, open_keys = set(), list(keys)
    while open_keys:
        row = by_key[open_keys.pop()]
        wanted.add(row.key)
        open_keys += [key for key in (row.after, row.requests_of) if key is not None]
    return [row for row in ROWS if row.key in wanted]


def quick(rows: Sequence[Row]) -> list[Row]:
    """The same rows with a quarter of the requests and of the tokens, but as many clients."""
    return [
        row
        if row.workload is None
        else msgspec.structs.replace(
            row,
            title=f"{row.title} (a quarter of the requests and of each answer)",
            workload=msgspec.structs.replace(
                row.workload,
                requests=max(row.concurrency, row.workload.requests // _QUICK_SHARE),
                output_tokens=max(1, row.workload.output_tokens // _QUICK_SHARE),
                arriving_output_tokens=row.workload.arriving_output_tokens // _QUICK_SHARE,
            ),
        )
        for row in rows
    ]
