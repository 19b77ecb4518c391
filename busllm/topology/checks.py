"""Values of a topology that are fine each alone and impossible together.

Owns: one small check per kind of mistake; each yields the key and words for what to do.
Does not know: types and ranges of single values (`typed_values.py`), files and lines (`read.py`), the model's files
(`model_fit.py`).
Next on the path: `placement.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from busllm.bus.connect import BUILT_IN_KINDS
from busllm.bus.nats_options import public_url
from busllm.engine.config import BUILT_IN_ATTENTIONS, COMPILED_PAGE_UNIT, cut_blocks, too_short_step
from busllm.ids import is_token
from busllm.registry import PluginGroup, plugin_names
from busllm.topology.address import parse_address
from busllm.topology.config import DEFAULT_PAGE_TOKENS, STAGE_KINDS, Topology
from busllm.topology.nearest import nearest
from busllm.topology.placement import StageId, all_stages, matching, parse_stage, place
from busllm.topology.problem import Problem
from busllm.topology.rank_checks import find_rank_problems
from busllm.topology.sizes import parse_memory
from busllm.topology.toml_lines import KeyPath

_HOST = re.compile(r"[A-Za-z0-9._-]+")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_BUS_URL = re.compile(r"(nats|tls)://[^\s/]+/?")
_THIS_HOST = "this host"  # no host's name has a blank


def find_problems(topology: Topology) -> Iterator[Problem]:
    """Yields the mistakes of a topology, those first that make the later checks possible."""
    yield from _names(topology)
    yield from _bus(topology)
    yield from _memory_bus(topology)
    yield from _model(topology)
    yield from _scheduler(topology)
    yield from _listen_syntax(topology)
    stage_problems = list(_stage_names(topology))
    yield from stage_problems
    if not stage_problems:
        yield from _placement(topology)
        yield from _hosts(topology)
        yield from _collisions(topology)
        yield from find_rank_problems(topology)


def _names(topology: Topology) -> Iterator[Problem]:
    if not is_token(topology.cluster):
        yield Problem(("cluster",), f'is "{topology.cluster}"; it may have letters, digits, "_" and "-".')
    for number, process in enumerate(topology.process):
        if process.host is not None and not _HOST.fullmatch(process.host):
            yield Problem(("process", number, "host"), f'is "{process.host}", which is no host name.')


def _bus(topology: Topology) -> Iterator[Problem]:
    bus = topology.bus
    yield from _misspelt(("bus", "kind"), bus.kind, BUILT_IN_KINDS, "busllm.bus")
    if bus.kind == "nats" and bus.url is not None:
        for url in bus.url.split(","):
            if not _BUS_URL.fullmatch(url.strip()):
                yield Problem(("bus", "url"), f'has "{public_url(url.strip())}"; it must look like nats://host:4222.')
    if bus.tls is not None and bus.tls.key_file is not None and bus.tls.certificate_file is None:
        yield Problem(("bus", "tls", "key_file"), "needs certificate_file beside it.")
    if bus.options and bus.kind in BUILT_IN_KINDS:
        yield Problem(("bus", "options"), "is for plug-ins; leave it out.")


def _memory_bus(topology: Topology) -> Iterator[Problem]:
    if topology.bus.kind != "memory":
        return
    for key in ("url", "credentials", "tls"):
        if getattr(topology.bus, key) is not None:
            yield Problem(("bus", key), 'means nothing with bus.kind = "memory"; leave it out.')
    if len(topology.process) > 1:
        yield Problem(
            ("bus", "kind"), 'is "memory", which lives in one process, but [[process]] names several; use "nats".'
        )


def _misspelt(path: KeyPath, name: str, built_in: tuple[str, ...], group: PluginGroup) -> Iterator[Problem]:
    """A name that is nearly a built-in one; any other may be a plug-in of the host that needs it."""
    near = nearest(name, built_in)
    if name not in built_in and near is not None and name not in plugin_names(group):
        yield Problem(path, f'is "{name}", which is neither built in nor installed.', near)


def _model(topology: Topology) -> Iterator[Problem]:
    if topology.model.null is not None and topology.model.source != "null":
        yield Problem(("model", "null"), 'has an effect only with model.source = "null".')


def _scheduler(topology: Topology) -> Iterator[Problem]:
    scheduler = topology.scheduler
    if scheduler.kv_tokens is not None and scheduler.kv_memory is not None:
        yield Problem(("scheduler", "kv_memory"), "stands beside kv_tokens; keep one of the two.")
    if isinstance(scheduler.kv_memory, str) and parse_memory(scheduler.kv_memory) is None:
        yield Problem(
            ("scheduler", "kv_memory"), f'is "{scheduler.kv_memory}"; write it like "4GiB", "512MiB" or 0.85 (a share).'
        )
    page_tokens = DEFAULT_PAGE_TOKENS if scheduler.page_tokens == "auto" else scheduler.page_tokens
    for key in ("step_tokens", "kv_tokens"):
        tokens = getattr(scheduler, key)
        if isinstance(tokens, int) and tokens < page_tokens:
            yield Problem(("scheduler", key), f"is {tokens}, below page_tokens ({page_tokens}): not one page fits.")
    if not _DEVICE.fullmatch(scheduler.device):
        near = nearest(scheduler.device, ("auto", "cpu", "cuda"))
        yield Problem(("scheduler", "device"), f'is "{scheduler.device}"; use auto, cpu, cuda or cuda:0.', near)
    yield from _misspelt(("scheduler", "attention"), scheduler.attention, BUILT_IN_ATTENTIONS, "busllm.attention")
    if scheduler.tensor_parallel > 1 and scheduler.attention == "cpu":
        yield Problem(("scheduler", "attention"), 'is "cpu", which computes on one rank; use "auto" or "torch".')
    if scheduler.attention == "cpu" and page_tokens % COMPILED_PAGE_UNIT:
        yield Problem(("scheduler", "page_tokens"), cut_blocks(page_tokens))
    if isinstance(scheduler.step_tokens, int) and scheduler.step_tokens < scheduler.max_running:
        yield Problem(("scheduler", "step_tokens"), too_short_step(scheduler.step_tokens, scheduler.max_running))
    if scheduler.collective_listen is not None:
        yield from _address(("scheduler", "collective_listen"), scheduler.collective_listen)


def _listen_syntax(topology: Topology) -> Iterator[Problem]:
    listen = topology.frontend.listen
    if isinstance(listen, str):
        yield from _address(("frontend", "listen"), listen)
        return
    for text in listen:
        yield from _address(("frontend", "listen"), text)
    if len(listen) != topology.frontend.count:
        yield Problem(
            ("frontend", "listen"),
            f"has {len(listen)} addresses for frontend.count = {topology.frontend.count}; "
            "give one per frontend, or one text for all.",
        )


def _address(path: KeyPath, text: str) -> Iterator[Problem]:
    try:
        parse_address(text)
    except ValueError as error:
        yield Problem(path, f"{error}.")


def _stage_names(topology: Topology) -> Iterator[Problem]:
    for number, process in enumerate(topology.process):
        path = ("process", number, "stages")
        if not process.stages:
            yield Problem(path, "is empty; name what runs there, or leave the table out.")
        for name in process.stages:
            try:
                pattern = parse_stage(name)
            except ValueError as error:
                yield Problem(path, f"{error}.", nearest(name.partition(":")[0], STAGE_KINDS))
                continue
            if not matching(topology, pattern):
                yield Problem(path, f'names "{name}", but {_how_many(topology, pattern.kind)}.')


def _how_many(topology: Topology, kind: str) -> str:
    ranks = f" and {kind}.tensor_parallel is {topology.scheduler.tensor_parallel}" if kind == "scheduler" else ""
    return f"{kind}.count is {topology.count_of(kind)}{ranks}, counted from 0"  # type: ignore[arg-type]


def _placement(topology: Topology) -> Iterator[Problem]:
    if not topology.process:
        return
    holders: dict[StageId, int] = {}
    for number, placed in enumerate(place(topology, _THIS_HOST)):
        for stage in placed.stages:
            if stage in holders:
                yield Problem(
                    ("process", number, "stages"), f"places {stage}, which process[{holders[stage]}] has already."
                )
            holders.setdefault(stage, number)
    for stage in all_stages(topology):
        if stage not in holders:
            yield Problem(("process",), f"no table places {stage}; add it to the stages of one.")
    for number, process in enumerate(topology.process):
        repeated = [name for name, times in Counter(process.stages).items() if times > 1]
        if repeated:
            yield Problem(("process", number, "stages"), f'names "{repeated[0]}" twice.')


def _hosts(topology: Topology) -> Iterator[Problem]:
    named = {process.host for process in topology.process}
    if None in named and len(named) > 1:
        number = next(number for number, process in enumerate(topology.process) if process.host is None)
        yield Problem(
            ("process", number, "host"),
            "is missing while other processes name one: every host would start this process. Name its host.",
        )
    if len(named) > 1 and topology.bus.kind == "nats" and topology.bus.url is None:
        yield Problem(
            ("bus", "url"),
            "is missing, but processes are on several hosts; name a NATS server that all of them reach.",
        )


def _collisions(topology: Topology) -> Iterator[Problem]:
    if isinstance(topology.frontend.listen, str):
        return
    taken: list[tuple[str, int]] = []
    for placed in place(topology, _THIS_HOST):
        for index in placed.frontend_indexes:
            address = parse_address(topology.listen_of(index))
            for host, other in taken:
                if host == placed.host and address.collides(parse_address(topology.listen_of(other))):
                    yield Problem(
                        ("frontend", "listen"),
                        f"frontends {other} and {index} are on the same host and both want port {address.port}.",
                    )
            taken.append((placed.host, index))
