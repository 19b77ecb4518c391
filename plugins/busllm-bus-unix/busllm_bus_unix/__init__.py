"""A busllm bus over a unix-domain socket. The plug-in's entry point names `make_bus`."""

from __future__ import annotations

from urllib.parse import urlsplit

from busllm_bus_unix.bus import UnixBus

from busllm.bus.connect import BusOptions
from busllm.errors import ConfigError


def make_bus(options: BusOptions) -> UnixBus:
    """The bus of a topology whose `bus.kind` is "unix".

    Raises:
        ConfigError: `bus.url` is not `unix:///path`, or another key of `[bus]` is set.
    """
    parts = urlsplit(options.url or "")
    if parts.scheme != "unix" or parts.netloc or not parts.path:
        raise ConfigError(f"{options.url!r} is not unix:///path/of/the/socket.", key="bus.url")
    unknown = [
        *options.extra,
        *(["tls"] if options.tls else []),
        *(["credentials"] if options.credentials_file else []),
    ]
    for key in unknown:
        raise ConfigError("the unix bus has no such option.", key=f"bus.{key}")
    return UnixBus(parts.path, max_payload_bytes=options.max_payload_bytes, bounds=options.bounds)


__all__ = ["UnixBus", "make_bus"]
