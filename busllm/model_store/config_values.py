"""Values of a decoded configuration file, each read with the type and the bounds that it must have.

Owns: `ConfigValues`, through which `config.json` is read, so that a wrong one is refused by file and key.
Does not know: which keys there are, and what they mean.
Next on the path: `description.py`, `engine/models/config.py`, `engine/models/rope_config.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from busllm.errors import ModelError

MAX_WHOLE = 2**31 - 1  # no count of a model is larger, and larger ones do not fit where they are used


class ConfigValues:
    """The values of one JSON object.

    A key that is absent gives the default where there is one; `null` counts as absent only in methods that end in
    `_or_none`. For a value of another type or out of bounds each raises a `ModelError` that names the file and the key.

    Args:
        values: the decoded object.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def whole(self, key: str, *, default: int | None = None, at_least: int = 1, at_most: int = MAX_WHOLE) -> int:
        """A whole number; without a default the key must be there."""
        value = self._values.get(key) if default is None else self._values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            bounds = f"of at least {at_least}" if at_most == MAX_WHOLE else f"between {at_least} and {at_most}"
            raise self.refusal(key, f"a whole number {bounds} is needed")
        return value

    def whole_or_none(self, key: str) -> int | None:
        """A whole number of at least 1; None = absent or null."""
        return None if self._values.get(key) is None else self.whole(key)

    def real(self, key: str, *, default: float | None = None, may_be_zero: bool = False) -> float:
        """A finite number over 0; without a default the key must be there."""
        value = self._values.get(key) if default is None else self._values.get(key, default)
        if value is None or not _is_real(value) or value < 0 or (value == 0 and not may_be_zero):
            raise self.refusal(key, f"a number {'of at least' if may_be_zero else 'over'} 0 is needed")
        return float(value)

    def real_or_none(self, key: str, *, may_be_zero: bool = False) -> float | None:
        """Like `real`; None = absent or null."""
        return None if self._values.get(key) is None else self.real(key, may_be_zero=may_be_zero)

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers over 0."""
        values = self._values.get(key)
        if not isinstance(values, list) or len(values) != count or not all(_is_real(one) and one > 0 for one in values):
            raise self.refusal(key, f"a list of {count} numbers over 0 is needed")
        return tuple(float(value) for value in values)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null is false."""
        value = self._values.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, "true or false is needed")
        return bool(value)

    def texts_or_none(self, key: str) -> list[str] | None:
        """A list of texts; None = absent or null."""
        values = self._values.get(key)
        if values is not None and not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
            raise self.refusal(key, "a list of texts is needed")
        return values

    def wholes(self, key: str) -> tuple[int, ...]:
        """One whole number, or a list of them; absent and null give none."""
        value = self._values.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
            raise self.refusal(key, "a whole number or a list of them is needed")
        return tuple(values)

    def section_or_none(self, key: str) -> dict[str, Any] | None:
        """A JSON object in this one; None = absent, null or empty."""
        value = self._values.get(key)
        if value and not isinstance(value, dict):
            raise self.refusal(key, "a JSON object is needed")
        return value or None

    def refusal(self, key: str, need: str) -> ModelError:
        """The error that says what the file has, and what it should have."""
        has = f"{key} = {self._values[key]!r}"[:200] if key in self._values else f"no {key}"
        return ModelError(f"{self._where} has {has}; {need}.")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
