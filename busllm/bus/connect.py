"""From a kind and options to a bus.

Owns: which kinds there are: `memory`, `nats`, and plug-ins of the group `busllm.bus`.
Does not know: topology files; whoever reads one fills in `BusOptions`.
Next on the path: the `Bus` that it returns.

A plug-in is a callable that takes `BusOptions` and returns a `Bus`; `busllm.testing.bus_conformance` tells whether it
keeps the guarantees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from busllm.bus.memory import DEFAULT_MAX_PAYLOAD_BYTES, MemoryBus
from busllm.bus.protocol import Bus
from busllm.bus.queue import QueueBounds
from busllm.errors import ConfigError
from busllm.registry import load_plugin

BUILT_IN_KINDS = ("memory", "nats")


class BusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a topology says of its bus.

    Attributes:
        url: where the server is; NATS takes several, joined by commas.
        credentials_file: a file with credentials, in the bus's own form.
        tls: TLS settings, in the bus's own form (NATS: `TlsOptions`).
        extra: keys that only a plug-in knows.
        max_payload_bytes: a limit below the bus's own; None: the bus's own.
        bounds: how much may wait on one connection.
    """

    url: str | None = None
    credentials_file: str | None = None
    tls: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    max_payload_bytes: int | None = None
    bounds: QueueBounds = QueueBounds()


def open_bus(kind: str, options: BusOptions) -> Bus:
    """Makes a bus; nothing is connected yet.

    Every call makes another memory bus: the actors that are to hear each other share one.

    Raises:
        ConfigError: an option is missing, unknown or wrong.
        MissingPackage: no such kind is installed.
    """
    if kind == "memory":
        _refuse_extra(kind, options)
        return MemoryBus(
            max_payload_bytes=options.max_payload_bytes or DEFAULT_MAX_PAYLOAD_BYTES, bounds=options.bounds
        )
    if kind == "nats":
        _refuse_extra(kind, options)
        return _nats_bus(options)
    bus: Bus = load_plugin("busllm.bus", kind, built_in=BUILT_IN_KINDS)(options)
    return bus


def _nats_bus(options: BusOptions) -> Bus:
    # nats-py takes 0.1 s to import, which a process on another bus need not spend.
    from busllm.bus.nats import NatsBus
    from busllm.bus.nats_options import NatsOptions, TlsOptions

    try:
        tls = None if options.tls is None else msgspec.convert(options.tls, TlsOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}.", key="bus.tls") from error
    return NatsBus(
        NatsOptions(
            urls=tuple(url.strip() for url in (options.url or "").split(",") if url.strip()),
            credentials_file=options.credentials_file,
            tls=tls,
            max_payload_bytes=options.max_payload_bytes,
            bounds=options.bounds,
        )
    )


def _refuse_extra(kind: str, options: BusOptions) -> None:
    for key in options.extra:
        raise ConfigError(f"the {kind} bus has no such option.", key=f"bus.{key}")
