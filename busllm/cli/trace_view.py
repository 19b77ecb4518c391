"""A request's way as people read it.

Owns: the order of events, the durations between them, the bars of a timeline, the one-line summary of a request.
Does not know: the bus, consoles' widths. Times are each stage's own, counted from when it took the request: the clocks
of two hosts are never subtracted, so bars of two stages have the same scale but not the same zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from busllm.ids import parse_instance
from busllm.telemetry.trace import ENDS, TraceEvent

OWNERS = ("frontend", "client")
_PATH = (*OWNERS, "tokenizer", "scheduler", "detokenizer")
_WIDE = 110  # columns from which on a terminal shows whole names and long bars
_MIN_BAR_CELLS, _MAX_BAR_CELLS = 12, 32
_MAX_DETAIL_CHARS = 48


class Row(msgspec.Struct, frozen=True):
    """One event of a timeline.

    Attributes:
        at_ms: since its stage took the request.
        took_ms: since the stage's event before, of the same choice.
    """

    event: TraceEvent
    at_ms: float
    took_ms: float


class Summary(msgspec.Struct, frozen=True):
    """One request in one line.

    Attributes:
        began: the owner's wall clock when it took the request; empty when no owner remembers it.
        stages: instances without their random part, in the order of the path.
        prompt_tokens, cached_tokens, output_tokens: None when nobody remembers.
        total_ms: from the first byte to the end, by the owner's clock; None while it runs.
        end: finished, aborted, failed with its code, or running.
    """

    uid: str
    began: str
    stages: tuple[str, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    total_ms: float | None
    end: str


def is_end(event: TraceEvent) -> bool:
    """Whether the request has ended with this event: its owner says so."""
    return event.stage in OWNERS and event.event in ENDS


def in_path_order(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Events by stage along the path; those of one instance stay in the order in which they happened."""
    return sorted(events, key=lambda event: (_place(event.stage), event.instance))


def rows_of(events: Iterable[TraceEvent]) -> list[Row]:
    """The timeline of one request."""
    rows: list[Row] = []
    before: dict[tuple[str, Any], float] = {}
    for event in in_path_order(events):
        choice = event.data.get("choice")
        began = before.get((event.instance, choice), before.get((event.instance, None), 0.0))
        rows.append(Row(event, event.elapsed_ms, max(0.0, event.elapsed_ms - began)))
        before[event.instance, choice] = event.elapsed_ms
    return rows


def timeline(rows: Sequence[Row], width: int | None) -> Table:
    """The timeline as a table.

    Args:
        width: of the terminal, for the bars and for how much of a name is shown; None = no bars, whole names.
    """
    is_narrow = width is not None and width < _WIDE
    names = {row.event.instance: _place_name(row.event.instance) if is_narrow else row.event.instance for row in rows}
    if len(set(names.values())) < len(names):  # two that held the same place one after the other
        names = {instance: instance for instance in names}
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("at ms", justify="right", no_wrap=True)
    table.add_column("took ms", justify="right", no_wrap=True)
    if width is not None:
        table.add_column("", no_wrap=True)
    table.add_column("details", overflow="fold")
    longest_ms = max((row.at_ms for row in rows), default=0.0)
    num_cells = _MAX_BAR_CELLS if not is_narrow else _MIN_BAR_CELLS
    shown = None
    for row in rows:
        event = row.event
        cells = ["" if event.instance == shown else names[event.instance], event.event]
        cells += [f"{row.at_ms:.3f}", f"{row.took_ms:.3f}"]
        bar = [_bar(row, longest_ms, num_cells)] if width is not None else []
        table.add_row(*cells, *bar, details(event))
        shown = event.instance
    return table


def _bar(row: Row, longest_ms: float, num_cells: int) -> Text:
    if not longest_ms:
        return Text()
    end = round(row.at_ms / longest_ms * num_cells)
    begin = min(round((row.at_ms - row.took_ms) / longest_ms * num_cells), end)
    return Text(" " * begin + ("━" * (end - begin) or "╹"), style=_style(row.event))


def _style(event: TraceEvent) -> str:
    match event.event:
        case "failed" | "aborted":
            return "red"
        case "retracted" | "sent_on":
            return "yellow"
        case _:
            return "green"


def details(event: TraceEvent) -> str:
    """The numbers and words of an event, on one line."""
    return " ".join(f"{name}={_short(value)}" for name, value in event.data.items())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_DETAIL_CHARS else f"{text[: _MAX_DETAIL_CHARS - 1]}…"


def line_of(event: TraceEvent) -> str:
    """One event as one line, for following."""
    where = f"{event.instance:<27} {event.elapsed_ms:>11.3f} ms"
    return f"{event.at}  {event.uid}  {where}  {event.event:<11} {details(event)}"


# ------------------------------------------------------------ summaries


def summaries(events: Iterable[TraceEvent], limit: int) -> list[Summary]:
    """One line for each of the latest `limit` requests, the latest last."""
    by_uid: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        by_uid[event.uid].append(event)
    found = [_summary(uid, in_path_order(own)) for uid, own in by_uid.items()]
    # Requests that no owner remembers are older than those that one does.
    return sorted(found, key=lambda summary: (bool(summary.began), summary.began))[-limit:]


def _summary(uid: str, events: Sequence[TraceEvent]) -> Summary:
    own = [event for event in events if event.stage in OWNERS]
    end = next((event for event in own if event.event in ENDS), None)
    return Summary(
        uid=uid,
        began=own[0].at if own else "",
        stages=tuple(dict.fromkeys(_place_name(event.instance) for event in events)),
        prompt_tokens=_first_number(events, "tokenizer", "tokenized", "prompt_tokens"),
        cached_tokens=_first_number(events, "scheduler", "admitted", "cached_tokens"),
        output_tokens=_output_tokens(events),
        total_ms=None if end is None else end.elapsed_ms,
        end="running" if end is None else _end_word(end),
    )


def _end_word(event: TraceEvent) -> str:
    return f"failed ({event.data.get('code')})" if event.event == "failed" else event.event


def _first_number(events: Sequence[TraceEvent], stage: str, name: str, key: str) -> int | None:
    for event in events:
        value = event.data.get(key)
        if event.stage == stage and event.event == name and isinstance(value, int):
            return value
    return None


def _output_tokens(events: Sequence[TraceEvent]) -> int | None:
    total = next((_first_number(events, owner, "finished", "completion_tokens") for owner in OWNERS), None)
    if total is not None:
        return total
    parts = [event.data.get("tokens") for event in events if (event.stage, event.event) == ("detokenizer", "finished")]
    counted = [part for part in parts if isinstance(part, int)]
    return sum(counted) if counted else None


def _place(stage: str) -> int:
    return _PATH.index(stage) if stage in _PATH else len(_PATH)


def _place_name(instance: str) -> str:
    try:
        kind, index = parse_instance(instance)
    except ValueError:
        return instance
    return f"{kind}-{index}"


def summary_table(found: Sequence[Summary]) -> Table:
    """Requests, one line each."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("uid", "left"),
        ("began", "left"),
        ("prompt", "right"),
        ("cached", "right"),
        ("output", "right"),
        ("total ms", "right"),
        ("end", "left"),
        ("stages", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=name == "uid")  # type: ignore[arg-type]
    for one in found:
        numbers = (one.prompt_tokens, one.cached_tokens, one.output_tokens)
        counts = ["-" if number is None else str(number) for number in numbers]
        total = "-" if one.total_ms is None else f"{one.total_ms:.1f}"
        table.add_row(one.uid, one.began or "-", *counts, total, one.end, " ".join(one.stages))
    return table
