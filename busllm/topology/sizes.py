"""Amounts of memory as people write them.

Owns: "4GiB" ↔ bytes.
Does not know: what the memory is for.
"""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS = _DECIMAL | {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", re.IGNORECASE)


def parse_memory(text: str) -> int | None:
    """Bytes of "4GiB", "512 MiB" or "2GB" (1000-based without the i); None when the text is no amount above 0."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        return None
    num_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    return num_bytes or None


def memory_text(num_bytes: float) -> str:
    """An amount for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
