"""Files that a topology names and that must be on this host.

Owns: finding out before anything is started that one is missing.
Does not know: what is in them; their reader checks that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from busllm.errors import ConfigError
from busllm.topology.config import Topology
from busllm.topology.placement import PlacedProcess


def check_local_files(topology: Topology, processes: Sequence[PlacedProcess]) -> None:
    """Checks that the named files can be read.

    Args:
        processes: of this host; frontends' files are needed only where a frontend is.

    Raises:
        ConfigError: one is not there, or not readable.
    """
    for key, name in _named_files(topology, any(process.holds("frontend") for process in processes)):
        try:
            with Path(name).open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{name!r} cannot be read: {error.strerror}.", key=key) from error


def _named_files(topology: Topology, has_frontend: bool) -> Iterator[tuple[str, str]]:
    bus, frontend = topology.bus, topology.frontend
    named: list[tuple[str, str | None]] = [("bus.credentials", bus.credentials)]
    if bus.tls is not None:
        named += [(f"bus.tls.{key}", getattr(bus.tls, key)) for key in ("ca_file", "certificate_file", "key_file")]
    if has_frontend:
        named.append(("frontend.api_keys_file", frontend.api_keys_file))
    if has_frontend and frontend.tls is not None:
        named += [(f"frontend.tls.{key}", getattr(frontend.tls, key)) for key in ("certificate_file", "key_file")]
    yield from ((key, name) for key, name in named if name is not None)
