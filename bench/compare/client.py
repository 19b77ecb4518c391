"""One row's load on a running server, by `busllm bench` in a process of its own, or beside it without a server.

Owns: the command line of `busllm bench`, and reading the row's figures off its report.
Does not know: whose turn it is (`rounds.py`).
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import msgspec

from bench.compare.machine import machine_busy_s
from bench.compare.peers.peer import Peer
from bench.compare.results import RowResult
from bench.compare.rows import Figure, Row
from bench.compare.server import RunningServer
from busllm.cli.load.report import Percentiles, Report
from busllm.cli.load.workload import Workload

_MIB = 1024 * 1024
_BENCH = (sys.executable, "-m", "busllm.cli.main", "bench")


def measure_row(row: Row, server: RunningServer, peer: Peer, seed: int) -> RowResult:
    """Runs a row, or reads off the server what a row without a load asks for.

    Args:
        server: of this peer; it waits while a row is computed without it.
    """
    if row.workload is None:
        known = {Figure.START: server.start_to_first_token_s, Figure.PSS: server.pss_bytes() / _MIB}
        return RowResult(figures={figure.value: known[figure] for figure in row.figures})
    workload = msgspec.structs.replace(row.workload, seed=seed)
    command: tuple[str, ...] | None
    if row.is_offline:
        command = peer.offline_command(workload, row.concurrency)
    else:
        load = bench_arguments(workload, row.concurrency)
        command = (*_BENCH, *load, "--url", server.url, "--model", peer.served_model, "--json", "-")
    if command is None:
        return RowResult(left_out="is measured on servers whose engine can be used without them")
    began_s, cpu_s, busy_s, client_s = time.perf_counter(), server.cpu_s(), machine_busy_s(), _client_s()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    server_s = server.cpu_s() - cpu_s
    other_s = machine_busy_s() - busy_s - server_s - (_client_s() - client_s)
    other_busy = round(max(0.0, other_s) / (time.perf_counter() - began_s), 3)
    if not done.stdout:
        return RowResult(error=done.stderr.strip() or f"{' '.join(command[:4])} ended with status {done.returncode}")
    if row.is_offline:
        return msgspec.structs.replace(msgspec.json.decode(done.stdout, type=RowResult), other_busy=other_busy)
    report = msgspec.json.decode(done.stdout, type=Report)
    return RowResult(
        figures={figure.value: value for figure, value in figures_of(row, report, server_s).items()},
        error=f"{report.failed} requests failed: {report.errors}" if report.failed else None,
        report=report,
        other_busy=other_busy,
    )


def bench_arguments(workload: Workload, concurrency: int) -> list[str]:
    """The flags of `busllm bench` that make a workload."""
    arguments = [
        *("--concurrency", str(concurrency)),
        *("--requests", str(workload.requests)),
        *("--input", str(workload.input_words)),
        *("--output", str(workload.output_tokens)),
        *("--shared", str(workload.shared_words)),
        *("--warmup", str(workload.warmup)),
        *("--seed", str(workload.seed)),
        *("--temperature", str(workload.temperature)),
        *("--arriving-output", str(workload.arriving_output_tokens)),
    ]
    if workload.top_p is not None:
        arguments += ["--top-p", str(workload.top_p)]
    if workload.arriving_words is not None:
        arguments += ["--arriving", str(workload.arriving_words)]
    flags = (
        ("--spread", workload.spread),
        ("--chat", workload.chat),
        ("--no-ignore-eos", not workload.ignore_eos),
    )
    return arguments + [flag for flag, is_set in flags if is_set]


def figures_of(row: Row, report: Report, server_cpu_s: float) -> dict[Figure, float]:
    """What a row asks for, as far as the report has it; nothing when a request failed, as the others had it easier.

    Args:
        server_cpu_s: CPU seconds of the server meanwhile, for the warm-up too.
    """
    if report.failed:
        return {}
    arrival = report.arrival
    num_tokens = report.output_tokens + ((arrival.output_tokens or 0) if arrival is not None else 0)
    known: dict[Figure, float | None] = {
        Figure.OUTPUT: report.output_tokens_per_s,
        Figure.REQUESTS: report.requests_per_s,
        Figure.TTFT_P50: _p50(report.ttft_ms),
        Figure.TTFT_P99: _p99(report.ttft_ms),
        Figure.INTER_TOKEN_P50: _p50(report.inter_token_ms),
        Figure.INTER_TOKEN_P99: _p99(report.inter_token_ms),
        Figure.STREAMS_P99: _p99(arrival.streams_inter_token_ms) if arrival is not None else None,
        Figure.LONG_TTFT: arrival.ttft_ms if arrival is not None else None,
        Figure.CPU: 1e3 * server_cpu_s / num_tokens if num_tokens else None,
    }
    return {figure: value for figure in row.figures if (value := known.get(figure)) is not None}


def _p50(found: Percentiles | None) -> float | None:
    return None if found is None else found.p50


def _p99(found: Percentiles | None) -> float | None:
    return None if found is None else found.p99


def _client_s() -> float:
    """CPU seconds of the clients that have ended, and of this process."""
    ended, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return ended.ru_utime + ended.ru_stime + own.ru_utime + own.ru_stime
