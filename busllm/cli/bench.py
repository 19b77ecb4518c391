"""`busllm bench`: a load generator for any OpenAI-compatible server.

Owns: its flags, the table, the files.
Does not know: how requests are made and measured (`cli/load/`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from busllm.cli.arguments import Once
from busllm.cli.http_target import HttpFailure, HttpTarget, add_http_arguments, find_http_target, served_model
from busllm.cli.load.ceiling import measure_ceiling
from busllm.cli.load.measured import Measured
from busllm.cli.load.picture import page, panels_of, svg
from busllm.cli.load.report import ArrivalReport, Percentiles, Report, report
from busllm.cli.load.run import Run, run
from busllm.cli.load.workload import Workload
from busllm.cli.terminal import console, print_aligned
from busllm.errors import ConfigError

STDOUT = "-"
PICTURES = (".svg", ".html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_http_arguments(parser)
    like = Workload()
    for flag, least, default, text in (
        ("--concurrency", 1, 8, "requests at the same time"),
        ("--requests", 1, like.requests, "requests in all"),
        ("--input", 0, like.input_words, "words per prompt, about one token each"),
        ("--output", 1, like.output_tokens, "tokens per answer"),
        ("--shared", 0, like.shared_words, "words that all prompts begin with"),
        ("--warmup", 0, like.warmup, "short requests before the clock starts"),
        ("--seed", 0, like.seed, "of texts and lengths; the same seed gives the same requests"),
    ):
        parser.add_argument(
            flag, metavar="N", type=_at_least(least), default=default, action=Once, help=f"{text} ({default})"
        )
    parser.add_argument(
        "--arriving",
        metavar="N",
        type=_at_least(1),
        action=Once,
        help="words of one long prompt more, sent when all others run; tells what it does to them",
    )
    parser.add_argument(
        "--arriving-output",
        metavar="N",
        type=_at_least(1),
        default=like.arriving_output_tokens,
        action=Once,
        help=f"tokens of its answer ({like.arriving_output_tokens})",
    )
    parser.add_argument("--spread", action="store_true", help="draw lengths between a quarter and the whole")
    parser.add_argument("--chat", action="store_true", help="chat completions instead of text completions")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, action=Once, help="0 = greedy (0)")
    parser.add_argument("--top-p", metavar="P", type=float, action=Once, help="without it, the server's default")
    parser.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early; for servers that refuse `ignore_eos`"
    )
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, action=Once, help="seconds for one request (600)"
    )
    parser.add_argument("--json", metavar="FILE", action=Once, help="write the figures as JSON; - = stdout, no table")
    parser.add_argument("--plot", metavar="FILE", action=Once, help="write a picture: FILE.svg or FILE.html")
    parser.add_argument(
        "--ceiling", action="store_true", help="measure this load generator itself, against a server that only sends"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Puts load on any OpenAI-compatible server and tells what its clients saw. Answers are streamed.

    Status 1 when a request failed. An API key is taken from the environment variable BUSLLM_API_KEY.
    """
    _check_files(arguments)
    workload = _workload(arguments)
    if arguments.ceiling:
        ceiling = anyio.run(measure_ceiling, workload, arguments.concurrency, backend_options={"use_uvloop": True})
        print(f"{ceiling.events_per_busy_s:.0f} events per second of this program's CPU time")
        print(f"{ceiling.events_per_s:.0f} events per second came from a server that only sends")
        return 0
    target = find_http_target(arguments)
    model = arguments.model or served_model(target)
    # uvloop takes a fifth off what this program itself needs for each event.
    load = (target, workload, model, arguments.concurrency, arguments.timeout)
    done = anyio.run(_run, *load, backend_options={"use_uvloop": True})
    made = report(done, url=target.url, model=model, concurrency=arguments.concurrency, workload=workload)
    _write(arguments, done, made)
    if made.is_doubtful:
        print(
            f"busllm bench: this program was busy {made.generator_busy:.0%} of the time and may have slowed the server "
            "down; `busllm bench --ceiling` tells what it can take.",
            file=sys.stderr,
        )
    return 1 if made.failed else 0


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        requests=arguments.requests,
        input_words=arguments.input,
        output_tokens=arguments.output,
        shared_words=arguments.shared,
        spread=arguments.spread,
        warmup=arguments.warmup,
        chat=arguments.chat,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        ignore_eos=not arguments.no_ignore_eos,
        seed=arguments.seed,
        arriving_words=arguments.arriving,
        arriving_output_tokens=arguments.arriving_output,
    )


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")
        return int(text)

    return whole_number


def _check_files(arguments: argparse.Namespace) -> None:
    """Says what cannot be written before the load, not after it."""
    if arguments.plot is not None and Path(arguments.plot).suffix not in PICTURES:
        raise ConfigError(f"--plot is {arguments.plot!r}; it must end in .svg or .html.")
    for flag, file in (("--plot", arguments.plot), ("--json", arguments.json)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{flag} is {file!r}; there is no such folder.")


async def _run(target: HttpTarget, workload: Workload, model: str, concurrency: int, timeout_s: float) -> Run:
    warmup = workload.warmup_bodies(model)
    if warmup:
        warmed = await run(
            target, workload.path, warmup, concurrency=len(warmup), timeout_s=timeout_s, on_done=lambda _: None
        )
        if all(one.error is not None for one in warmed.measured):
            raise HttpFailure(f"{target.url}: every warm-up request failed: {warmed.measured[0].error}")
    out = Console(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn by hand, twice a second: a thread that redraws would take time from what is measured.
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task("", total=workload.requests)
        shown_at_s = 0.0

        def done(one: Measured) -> None:
            nonlocal shown_at_s
            bar.advance(task)
            if one.ended_s - shown_at_s > 0.5:
                shown_at_s = one.ended_s
                bar.refresh()

        return await run(
            target,
            workload.path,
            workload.bodies(model),
            concurrency=concurrency,
            timeout_s=timeout_s,
            on_done=done,
            arriving_body=workload.arriving_body(model),
        )


# ------------------------------------------------------------ results


def _write(arguments: argparse.Namespace, done: Run, made: Report) -> None:
    figures = msgspec.json.format(msgspec.json.encode(made)).decode() + "\n"
    if arguments.json == STDOUT:
        sys.stdout.write(figures)
    else:
        print_aligned(console(), table_of(made))
        if arguments.json is not None:
            Path(arguments.json).write_text(figures)
    if arguments.plot is not None:
        title = f"{made.model} at {made.url}, {made.concurrency} at a time"
        picture = svg(panels_of(done, made), title)
        is_page = Path(arguments.plot).suffix == ".html"
        Path(arguments.plot).write_text(page(picture, title, rows_of(made)) if is_page else picture)


def rows_of(made: Report) -> list[tuple[str, str]]:
    """The figures, each with its name."""
    asked = made.workload
    lengths = f"{asked.shared_words} shared + {asked.input_words} words in, {asked.output_tokens} tokens out"
    rows = [
        ("server", f"{made.url}, model {made.model}"),
        (
            "load",
            f"{asked.requests} requests, {made.concurrency} at a time; {lengths}{', spread' if asked.spread else ''}",
        ),
        ("ok / failed", f"{made.ok} / {made.failed}"),
        ("duration", f"{made.wall_s:.2f} s"),
        ("tokens in / out", f"{made.input_tokens} / {made.output_tokens}"),
        ("output", f"{made.output_tokens_per_s:.1f} tok/s"),
        ("in and out", f"{made.total_tokens_per_s:.1f} tok/s"),
        ("requests", f"{made.requests_per_s:.2f} /s"),
        ("time to first text", _percentiles(made.ttft_ms)),
        ("between two texts", _percentiles(made.inter_token_ms)),
        ("load generator", f"busy {made.generator_busy:.0%} of the time"),
    ]
    if made.arrival is not None:
        rows += _arrival_rows(made.arrival)
    return rows + [(f"failed {count}x", error) for error, count in made.errors.items()]


def _arrival_rows(arrival: ArrivalReport) -> list[tuple[str, str]]:
    counted = f"{_count(arrival.input_tokens)} tokens in, {_count(arrival.output_tokens)} out"
    times = f"first text after {_ms(arrival.ttft_ms)}, done after {_ms(arrival.duration_ms)}"
    return [
        ("long prompt", f"{counted}; {times}"),
        ("others meanwhile", _percentiles(arrival.streams_inter_token_ms)),
    ]


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def _ms(time_ms: float | None) -> str:
    return "-" if time_ms is None else f"{time_ms:.0f} ms"


def _percentiles(found: Percentiles | None) -> str:
    if found is None:
        return "-"
    return f"p50 {found.p50:.2f}  p90 {found.p90:.2f}  p99 {found.p99:.2f}  max {found.max:.2f} ms"


def table_of(made: Report) -> Table:
    """The figures as a table."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows_of(made):
        table.add_row(name, value)
    return table
