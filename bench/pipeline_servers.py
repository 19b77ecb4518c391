"""What the whole pipeline costs: a server with the null engine, loaded over HTTP, its processes' CPU time per token.

Owns: the placements that are compared, starting them, their CPU time from `/proc`.
Does not know: single hops (`pipeline_hops.py`), the table (`pipeline.py`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec

from bench.compare.process_tree import PROC, processes_under
from busllm.cli.http_target import HttpTarget
from busllm.cli.load.run import Run, run
from busllm.cli.load.workload import Workload
from busllm.topology.config import STAGE_KINDS

READY_S = 60.0
LOAD_S = 300.0
OUTPUT_TOKENS = 1000
KV_TOKENS = 2**18  # all streams fit: no sequence gives its pages back and computes them again
_COMMAND = (sys.executable, "-m", "busllm.cli.main")

KINDS = ("frontend", "tokenizer", "detokenizer", "scheduler")
PLACEMENTS: Mapping[str, str] = {
    "memory, one process": '[bus]\nkind = "memory"\n',
    "NATS, scheduler apart (the default)": "",
    "NATS, each stage apart": "".join(f'[[process]]\nstages = ["{kind}"]\n' for kind in KINDS),
}


class Load(msgspec.Struct, frozen=True):
    """One load on one placement.

    Attributes:
        placement: a key of `PLACEMENTS`.
        streams: at the same time; each makes `OUTPUT_TOKENS`.
        output_tokens_per_s: as the client counts.
        events_per_token: pieces of text that the client saw, per token.
        cpu_us: CPU time per token by process: its stages' names, `nats-server`, `client`.
    """

    placement: str
    streams: int
    output_tokens_per_s: float
    events_per_token: float
    cpu_us: dict[str, float]


def measure(placement: str, streams: tuple[int, ...], step_time_s: float, directory: Path) -> Iterator[Load]:
    """Starts a placement and loads it with each number of streams in turn.

    Args:
        placement: a key of `PLACEMENTS`.
        step_time_s: of the null engine.
        directory: for the server's files.
    """
    with _server(PLACEMENTS[placement], step_time_s, directory) as (process, url):
        for number in streams:
            yield _load(placement, number, process.pid, url)


@contextmanager
def _server(placement: str, step_time_s: float, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    topology = directory / "pipeline.toml"
    topology.write_text(
        f'cluster = "pipeline"\n[model]\nsource = "null"\nnull = {{ step_time_s = {step_time_s} }}\n'
        f'[frontend]\nlisten = "127.0.0.1:{port}"\n[scheduler]\nkv_tokens = {KV_TOKENS}\n{placement}'
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(directory), "BUSLLM_LOG_LEVEL": "warning"}
    process = subprocess.Popen([*_COMMAND, "up", "--topology", str(topology)], env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url)
        yield process, url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    give_up_at_s = time.monotonic() + READY_S
    while time.monotonic() < give_up_at_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=1.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"The server was not ready within {READY_S:g} s.")


def _load(placement: str, streams: int, root: int, url: str) -> Load:
    workload = Workload(requests=streams, input_words=20, output_tokens=OUTPUT_TOKENS)
    before = {status.pid: status.cpu_s for status in processes_under(root)}
    done = anyio.run(_send, HttpTarget(url, None), workload, backend_options={"use_uvloop": True})
    failed = [one.error for one in done.measured if one.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    num_tokens = streams * OUTPUT_TOKENS
    cpu_us: dict[str, float] = {}
    for status in processes_under(root):
        used_us = (status.cpu_s - before.get(status.pid, 0.0)) / num_tokens * 1e6
        name = _name_of(status.pid)
        cpu_us[name] = cpu_us.get(name, 0.0) + used_us
    cpu_us["client"] = done.busy_s / num_tokens * 1e6
    num_events = sum(len(one.text_s) for one in done.measured)
    return Load(placement, streams, num_tokens / (done.ended_s - done.began_s), num_events / num_tokens, cpu_us)


async def _send(target: HttpTarget, workload: Workload) -> Run:
    return await run(
        target,
        workload.path,
        workload.bodies("null"),
        concurrency=workload.requests,
        timeout_s=LOAD_S,
        on_done=lambda _: None,
    )


def _name_of(pid: int) -> str:
    words = (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
    stages = [word.partition(":")[0] for word in words if word.partition(":")[0] in STAGE_KINDS]
    if stages:
        return " ".join(stages)
    return "nats-server" if any(word.endswith("nats-server") for word in words) else "up"
