"""How to reach a NATS server.

Owns: the options of the NATS bus, their checks, TLS contexts, URLs without secrets.
Does not know: connections (`bus/nats.py`).
"""

from __future__ import annotations

import importlib.util
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from busllm.bus.queue import QueueBounds
from busllm.bus.retry import RetryTimings
from busllm.errors import ConfigError, MissingPackage


def public_url(url: str) -> str:
    """The URL without token, user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class TlsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS to the bus server.

    Attributes:
        ca_file: PEM file with the authorities to trust; None: those of the system.
        certificate_file: PEM file with this client's certificate, for servers that ask for one.
        key_file: its private key, unless it is in the same file.
        server_name: the name that the server's certificate must have; None: the host of the URL.
        handshake_first: TLS begins before the server says anything.
    """

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    handshake_first: bool = False

    def context(self) -> ssl.SSLContext:
        """Reads the files.

        Raises:
            ConfigError: one of them cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except OSError as error:  # ssl's own errors among them
            raise ConfigError(f"the TLS files cannot be used: {error}.", key="bus.tls") from error
        return context


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a NATS server, and how patient to be.

    Attributes:
        urls: servers of one cluster, tried in turn: `nats://` or `tls://`, with token or user and password if need be.
        credentials_file: a NATS `.creds` file (JWT and nkey seed).
        tls: demands TLS; a `tls://` URL does so too.
        max_payload_bytes: a limit below the server's own.
        bounds: how much may wait on one connection.
        retry: pauses between attempts to connect.
        ping_interval_s: a server that misses two pings is lost.
        connect_timeout_s: for each step of one attempt to connect.
        close_timeout_s: the longest that closing waits for the last flush.
    """

    urls: tuple[str, ...]
    credentials_file: str | None = None
    tls: TlsOptions | None = None
    max_payload_bytes: int | None = None
    bounds: QueueBounds = QueueBounds()
    retry: RetryTimings = RetryTimings()
    ping_interval_s: float = 1.0
    connect_timeout_s: int = 2
    close_timeout_s: float = 2.0

    def check(self) -> None:
        """Checks what can be checked without a server.

        Raises:
            ConfigError: a URL is not `nats://…` or `tls://…`, or the credentials file is not there.
            MissingPackage: a credentials file needs the package `nkeys`.
        """
        if not self.urls:
            raise ConfigError("no URL of a bus server is given.", key="bus.url")
        for url in self.urls:
            _check_url(url)
        if self.credentials_file is None:
            return
        if not Path(self.credentials_file).is_file():
            raise ConfigError(f"{self.credentials_file!r} is not a file.", key="bus.credentials")
        if importlib.util.find_spec("nkeys") is None:
            raise MissingPackage("bus.credentials needs the package 'nkeys': install it with `pip install nkeys`.")

    @property
    def must_encrypt(self) -> bool:
        """Whether nothing may be sent without TLS."""
        return self.tls is not None or any(urlsplit(url).scheme == "tls" for url in self.urls)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("nats", "tls") and parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that is no number
        is_right = False
    if not is_right:
        raise ConfigError(f"{public_url(url)!r} is not nats://host:port or tls://host:port.", key="bus.url")
