"""From the bytes of a body to a checked value, without ever blocking the event loop.

Owns: strict JSON decoding into a Struct; the translation of its errors to sentences that name the field.
Does not know: what the fields mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
from anyio import to_thread

from busllm.errors import InvalidRequest

B = TypeVar("B", bound=msgspec.Struct)
R = TypeVar("R")

MAX_INLINE_BYTES = 256 * 1024

_PLACE = re.compile(r"^(?P<text>.*?) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_LAST_INDEX = re.compile(r"(\[[^\]]*\])+$")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_GENERATES = "structured_outputs"  # a field that only the generating endpoints have
# Names that other servers' generating endpoints have, and how the same is asked for here.
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "guided_json": '"structured_outputs": {"json": …}',
        "guided_regex": '"structured_outputs": {"regex": …}',
        "guided_choice": '"structured_outputs": {"choice": …}',
        "guided_grammar": '"structured_outputs": {"grammar": …}',
        "prompt_logprobs": '"echo": true with "logprobs", at /v1/completions',
    }
)
_JSON_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
_TYPES = re.compile(r"^Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`$")


class BodyDecoder(Generic[B]):
    """Decodes one kind of body and makes something of it.

    Args:
        body_type: the Struct; its name stays inside.
    """

    def __init__(self, body_type: type[B]) -> None:
        self._decoder = msgspec.json.Decoder(body_type)
        self._fields = tuple(field.encode_name for field in msgspec.structs.fields(body_type))

    def decode(self, raw: bytes) -> B:
        """Decodes a body.

        Raises:
            InvalidRequest: it is not JSON, not an object, or a field is unknown, missing or of the wrong type.
        """
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            self._refuse(str(error), error)
        except msgspec.DecodeError as error:
            raise InvalidRequest(_syntax_message(raw, error)) from error
        except RecursionError as error:
            raise InvalidRequest("The body is nested too deeply.") from error

    async def read(self, raw: bytes, make: Callable[[B], R]) -> tuple[B, R]:
        """Decodes a body and makes something of it, a large one in a thread so that other streams go on.

        Raises:
            InvalidRequest: see `decode`, and what `make` raises.
        """

        def work() -> tuple[B, R]:
            body = self.decode(raw)
            return body, make(body)

        return await to_thread.run_sync(work) if len(raw) > MAX_INLINE_BYTES else work()

    def _refuse(self, message: str, cause: Exception) -> NoReturn:
        place = _PLACE.match(message)
        text, path = (place["text"], place["path"]) if place else (message, "")
        if unknown := _UNKNOWN_FIELD.match(text):
            name = ".".join(part for part in (path, unknown["name"]) if part)[:100]
            raise InvalidRequest(f"Unknown field {name!r}.{self._hint(name, path)}", param=name) from cause
        if missing := _MISSING_FIELD.match(text):
            name = ".".join(part for part in (path, missing["name"]) if part)
            raise InvalidRequest(f"{name} is missing.", param=name) from cause
        where = path or "The body"
        raise InvalidRequest(f"{where}: {_plain(text)}", param=_LAST_INDEX.sub("", path) or None) from cause

    def _hint(self, name: str, path: str) -> str:
        if path:
            return ""
        if name in _ELSEWHERE and _GENERATES in self._fields:
            return f" Here it is {_ELSEWHERE[name]}."
        near = difflib.get_close_matches(name, self._fields, n=1)
        return f" Did you mean {near[0]!r}?" if near else ""


def _plain(text: str) -> str:
    """The decoder's finding in JSON's words instead of Python's."""
    match = _TYPES.match(text)
    if match is None:
        return f"{text}."
    expected = " or ".join(_JSON_WORDS.get(word, word) for word in match["expected"].split(" | "))
    return f"expected {expected}, got {_JSON_WORDS.get(match['got'], match['got'])}."


def _syntax_message(raw: bytes, error: Exception) -> str:
    if not raw.strip():
        return "The body is empty; send a JSON object."
    if "surrogate" in str(error) or ("truncated" in str(error) and _ESCAPED_SURROGATE.search(raw)):
        return "The body is not valid JSON: a string has half of a surrogate pair (\\ud800 to \\udfff)."
    return f"The body is not valid JSON: {error}."


def check_plain(value: Any, name: str) -> None:
    """Checks that a value which is handed on as it is can travel on the bus.

    Raises:
        InvalidRequest: an integer in it does not fit into 64 bits.
    """
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise InvalidRequest(f"{name} has an integer that is too large.", param=name) from error
