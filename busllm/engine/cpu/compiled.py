"""Functions for numba's compiled code whose body is LLVM.

Owns: the one way to make them.
Does not know: what they do.
Next on the path: `lanes.py`, `tiles.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from numba.extending import intrinsic


def from_llvm(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function for compiled code of one that writes LLVM.

    Args:
        result: numba type of the result.
        arguments: numba types of the arguments.

    Returns:
        A decorator of a function (builder, *values) that returns the value, or None when `result` is void; what it
        makes keeps that function as `write`.
    """

    def wrap(write: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            value = write(builder, *values)
            return context.get_dummy_value() if value is None else value

        def typing(_context: Any, *_arguments: Any) -> Any:
            return result(*arguments), generate

        # numba binds the arguments of a call by position to the names that it finds here.
        names = ["context", *(f"value_{index}" for index in range(len(arguments)))]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typing.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        typing.__name__ = typing.__qualname__ = write.__name__
        typing.__doc__ = write.__doc__
        made = intrinsic(typing)
        made.write = write
        return made

    return wrap
