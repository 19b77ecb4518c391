"""The listening sockets of this host's frontends.

Owns: binding them at once, one socket for all frontends that share an address, and their files' numbers for children.
Does not know: HTTP. A socket stays open while its frontends restart: connections wait in its queue and are not refused.
Next on the path: `child.py` passes them on.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from busllm.topology.address import bind, client_url, parse_address
from busllm.topology.config import Topology
from busllm.topology.placement import PlacedProcess


class Listeners:
    """Open sockets by frontend index. Made by `listening`."""

    def __init__(self, by_index: dict[int, socket.socket], *, tls: bool) -> None:
        self._by_index = by_index
        self._tls = tls

    @property
    def fds(self) -> dict[int, int]:
        """File descriptors by frontend index."""
        return {index: listener.fileno() for index, listener in self._by_index.items()}

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs for clients on this host, each once."""
        return tuple(dict.fromkeys(client_url(listener, tls=self._tls) for listener in self._by_index.values()))

    def url_of(self, index: int) -> str:
        """URL of one frontend for clients on this host."""
        return client_url(self._by_index[index], tls=self._tls)


@contextmanager
def listening(topology: Topology, processes: Sequence[PlacedProcess]) -> Iterator[Listeners]:
    """Binds the addresses of all frontends of these processes; closes them at the end.

    Raises:
        AddressUnavailable: one cannot be bound.
    """
    with ExitStack() as stack:
        by_text: dict[str, socket.socket] = {}
        by_index: dict[int, socket.socket] = {}
        for process in processes:
            for index in process.frontend_indexes:
                text = topology.listen_of(index)
                if text not in by_text:
                    by_text[text] = stack.enter_context(bind(parse_address(text)))
                by_index[index] = by_text[text]
        yield Listeners(by_index, tls=topology.frontend.tls is not None)
