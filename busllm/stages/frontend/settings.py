"""Settings of the HTTP frontend, after the topology file and the model's files were read.

Owns: the frozen settings that every file of this package is given.
Does not know: where they come from (`topology/config.py`, the model's description).
"""

from __future__ import annotations

import msgspec

DEFAULT_MAX_BODY_BYTES = 8 * 1024 * 1024


class HttpTimings(msgspec.Struct, frozen=True, kw_only=True):
    """How long the frontend waits for its clients.

    Attributes:
        header_wait_s: a streamed answer's status and headers leave with the first text, or after this long.
        ping_s: silence after which a stream gets a comment line.
        unread_s: a client that reads nothing for this long has left.
        body_wait_s: time for a request's body to arrive.
        keep_alive_s: time for a request's head to arrive, from the connection's start or the last answer's end.
        linger_s: after an answer that came before the whole body, time in which the rest is read and thrown away, so
            that the client sees the answer and not a reset.
        stop_s: time for connections to close at the end of a drain.
    """

    header_wait_s: float = 10.0
    ping_s: float = 15.0
    unread_s: float = 60.0
    body_wait_s: float = 30.0
    keep_alive_s: float = 20.0
    linger_s: float = 2.0
    stop_s: float = 3.0


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """Files for HTTPS, PEM: the server's certificate chain and key, and optionally the authorities whose client
    certificates are required."""

    certificate: str
    key: str
    client_authorities: str | None = None


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the frontend serves and how.

    Attributes:
        model_name: the one name that requests may give as `model`.
        max_model_len: context of the model in tokens, prompt and answer together.
        vocab_size: number of logits of the model.
        has_chat_template: without one, chat requests are refused.
        created: seconds since the epoch, shown by `/v1/models`.
        api_keys: accepted keys; empty = none is needed.
        cors_origins: origins that browsers may call from; `*` = any; empty = CORS is off.
        max_body_bytes: larger bodies are refused.
        max_head_bytes: larger request lines and headers are refused.
        drain_timeout_s: time that running requests have to finish once the shutdown began.
        timings: see `HttpTimings`.
        tls: None = plain HTTP.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool = True
    created: int = 0
    api_keys: frozenset[str] = frozenset()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_head_bytes: int = 64 * 1024
    drain_timeout_s: float = 30.0
    timings: HttpTimings = HttpTimings()
    tls: Tls | None = None
