"""Addresses of the form `host:port`, and sockets bound to them.

Owns: the syntax, the check that two addresses collide, binding a listening socket at once, and the URL for clients.
Does not know: who listens (`up.py` passes the sockets on; a stage started by hand binds its own).
"""

from __future__ import annotations

import re
import socket

import msgspec

from busllm.errors import AddressUnavailable

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
WILDCARDS = ("0.0.0.0", "::")
_BACKLOG = 2048


class Address(msgspec.Struct, frozen=True):
    """A host (name, IPv4 or IPv6 address without brackets) and a port; port 0 = a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def collides(self, other: Address) -> bool:
        """Whether one host cannot listen on both."""
        same_host = self.host == other.host or self.host in WILDCARDS or other.host in WILDCARDS
        return same_host and self.port == other.port != 0


def parse_address(text: str) -> Address:
    """Reads `host:port` or `[ipv6]:port`.

    Raises:
        ValueError: the text has another form, or the port is over 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" must look like 127.0.0.1:8000, name:8000 or [::1]:8000')
    if int(match["port"]) > 65535:
        raise ValueError(f'"{text}" has a port over 65535')
    return Address(match["ipv6"] or match["host"], int(match["port"]))


def bind(address: Address) -> socket.socket:
    """Binds and listens at once, so that a taken port is seen before anything is loaded.

    Raises:
        AddressUnavailable: taken, not an address of this host, or not allowed.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:  # socket.gaierror is one
        raise AddressUnavailable(str(address), error.strerror or str(error)) from error
    return listener


def client_url(listener: socket.socket, *, tls: bool) -> str:
    """The URL by which a client on this host reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    if host in WILDCARDS:
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{'https' if tls else 'http'}://{Address(host, port)}"


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it."""
    return host == "localhost" or host.startswith("127.") or host == "::1"
