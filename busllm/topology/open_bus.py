"""From a topology to its bus.

Owns: which keys of `[bus]` become which option.
Does not know: buses (`busllm/bus/connect.py`).
"""

from __future__ import annotations

import msgspec

from busllm.bus.connect import BusOptions, open_bus
from busllm.bus.protocol import Bus
from busllm.topology.config import BusConfig


def open_topology_bus(config: BusConfig, url: str | None) -> Bus:
    """Makes the bus of a topology; nothing is connected yet.

    Args:
        url: with its secret; instead of the one in the file, which a server started by `busllm up` does not have.

    Raises:
        ConfigError: an option is wrong.
        MissingPackage: the plug-in is not installed.
    """
    options = BusOptions(
        url=url or config.url,
        credentials_file=config.credentials,
        tls=None if config.tls is None else msgspec.structs.asdict(config.tls),
        extra=config.options,
        max_payload_bytes=config.max_payload_bytes if config.kind == "memory" else None,
    )
    return open_bus(config.kind, options)
