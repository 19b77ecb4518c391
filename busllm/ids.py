"""Identifiers: request uids and stage instance names.

Owns: how they are drawn and what they look like. Both are server-generated, so that nothing of a client's text can
ever become part of a bus subject.
Does not know: subjects (`bus/subjects.py` builds them from these).
"""

from __future__ import annotations

import re
import secrets
from typing import NewType

Uid = NewType("Uid", str)
Instance = NewType("Instance", str)

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"  # RFC 4648 base32, lower case
UID_LENGTH = 20
_UID = re.compile(rf"[a-z2-7]{{{UID_LENGTH}}}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,200}")
_INSTANCE = re.compile(r"(?P<kind>[a-z]+)-(?P<index>\d+)-[a-z2-7]{8}")


def _random_base32(length: int) -> str:
    return "".join(_ALPHABET[byte & 31] for byte in secrets.token_bytes(length))


def is_token(text: str) -> bool:
    """Whether `text` may be one token of a busllm subject: letters, digits, `_` and `-`."""
    return _TOKEN.fullmatch(text) is not None


def check_tokens(*names: str) -> None:
    """Checks that words from a message may become tokens of a subject.

    Raises:
        ValueError: one may not.
    """
    for name in names:
        if not is_token(name):
            raise ValueError(f"{name[:80]!r} cannot be a token of a subject")


def new_uid() -> Uid:
    """Draws a request uid: 20 random base32 characters (100 bits)."""
    return Uid(_random_base32(UID_LENGTH))


def is_uid(text: str) -> bool:
    """Whether `text` has the form of a uid."""
    return _UID.fullmatch(text) is not None


def new_instance(kind: str, index: int) -> Instance:
    """Draws an instance name `<kind>-<index>-<8 random base32>`, new at every start of a stage."""
    return Instance(f"{kind}-{index}-{_random_base32(8)}")


def parse_instance(instance: str) -> tuple[str, int]:
    """Splits an instance name into kind and index.

    Raises:
        ValueError: the text does not have that form.
    """
    match = _INSTANCE.fullmatch(instance)
    if match is None:
        raise ValueError(f"{instance!r} is not an instance name")
    return match["kind"], int(match["index"])
