"""API keys: who may ask.

Owns: reading a file of keys; comparing what a request brings with them.
Does not know: which paths are open (`app.py`).
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from busllm.errors import ConfigError, Unauthorized

_KEY = "frontend.api_keys_file"


def read_api_keys(path: str | Path) -> frozenset[str]:
    """Reads a file with one key per line; empty lines and lines that begin with `#` are left out.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or has no key: a server that was given an empty file must
            not be open to everybody.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}", key=_KEY) from error
    lines = (line.strip() for line in text.splitlines())
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{str(path)!r} has no key; write one per line, or leave the setting out.", key=_KEY)
    return keys


class ApiKeys:
    """The accepted keys, kept as digests so that comparing takes the same time for every wrong key."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, authorization: bytes | None) -> None:
        """Checks the value of the Authorization header.

        Raises:
            Unauthorized: it is missing, of another scheme, or its key is not accepted. The message says nothing about
                the keys that are.
        """
        if not self._digests:
            return
        if authorization is None:
            raise Unauthorized("An API key is needed: send the header 'Authorization: Bearer <key>'.")
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, so that the time taken says nothing about which one came close.
        matches = [hmac.compare_digest(digest, accepted) for accepted in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthorized("The API key is not accepted.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
