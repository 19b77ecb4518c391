"""`busllm trace`: a request's way through the stages.

Owns: its flags; which events are asked for and in which form they are printed.
Does not know: the form itself (`trace_view.py`), how events are collected (`busllm/client.py`).
"""

from __future__ import annotations

import argparse
import sys

import anyio
import msgspec

from busllm.actors.trace_feed import Traces
from busllm.cli.arguments import Once, add_cluster_arguments
from busllm.cli.bus_client import run_with_client, uid
from busllm.cli.terminal import console, print_aligned
from busllm.cli.trace_view import in_path_order, is_end, line_of, rows_of, summaries, summary_table, timeline
from busllm.client import Client
from busllm.telemetry.trace import TraceEvent

DEFAULT_LAST = 20
LAST_WORDS_S = 0.5  # the other stages tell their ends at about the time of the owner's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("uid", metavar="UID", nargs="?", type=uid, help="a request; without it, the latest ones")
    parser.add_argument("--follow", action="store_true", help="print events as they happen; with UID until its end")
    parser.add_argument("--json", action="store_true", help="print the events themselves, one JSON object a line")
    parser.add_argument(
        "--last", metavar="N", type=_count, default=DEFAULT_LAST, action=Once, help="how many of the latest (20)"
    )
    add_cluster_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Shows the way of a request through the stages as a timeline, or the latest requests, one line each.

    Times are each stage's own, counted from when it took the request.
    """
    uid, as_json = arguments.uid, arguments.json
    if arguments.follow:
        return run_with_client(arguments, lambda client: follow(client, uid, as_json))
    if uid is None:
        return run_with_client(arguments, lambda client: show_latest(client, arguments.last, as_json))
    return run_with_client(arguments, lambda client: show_one(client, uid, as_json))


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 100")
    return int(text)


async def show_one(client: Client, uid: str, as_json: bool = False) -> int:
    """Prints one request's timeline; 1 when nobody remembers it."""
    traces = await client.trace(uid)
    _tell_of_silence(traces)
    if not traces.events:
        print(f"busllm trace: no stage remembers {uid}.", file=sys.stderr)
        return 1
    if as_json:
        _print_json(in_path_order(traces.events))
        return 0
    out = console()
    out.print(uid)
    print_aligned(out, timeline(rows_of(traces.events), out.width if out.is_terminal else None))
    return 0


async def show_latest(client: Client, limit: int, as_json: bool = False) -> int:
    """Prints the latest requests, one line each."""
    traces = await client.latest_traces(limit)
    _tell_of_silence(traces)
    if as_json:
        _print_json(sorted(traces.events, key=lambda event: event.at))
    elif traces.events:
        print_aligned(console(), summary_table(summaries(traces.events, limit)))
    else:
        print("busllm trace: no stage remembers a request.", file=sys.stderr)
    return 0


async def follow(client: Client, uid: str | None, as_json: bool = False) -> int:
    """Prints events as they happen: of one request until its end, with what went before; or of all, for ever."""
    with anyio.CancelScope() as scope:
        async with client.follow_traces(uid) as events:
            past = in_path_order((await client.trace(uid)).events) if uid is not None else []
            known = {_identity(event) for event in past}
            for event in past:
                _print_event(event, as_json)
            if any(is_end(event) for event in past):
                return 0
            async for event in events:
                if _identity(event) in known:
                    continue  # it happened between the subscription and the question
                _print_event(event, as_json)
                if uid is not None and is_end(event):
                    scope.deadline = anyio.current_time() + LAST_WORDS_S
    return 0


def _identity(event: TraceEvent) -> tuple[str, str, str, float]:
    return event.instance, event.event, event.at, event.elapsed_ms


def _print_event(event: TraceEvent, as_json: bool) -> None:
    print(msgspec.json.encode(event).decode() if as_json else line_of(event), flush=True)


def _print_json(events: list[TraceEvent]) -> None:
    for event in events:
        _print_event(event, as_json=True)


def _tell_of_silence(traces: Traces) -> None:
    for instance, reason in traces.silent.items():
        print(f"busllm trace: {instance} gave no answer: {reason}", file=sys.stderr)
