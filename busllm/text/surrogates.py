"""Text that no encoding can express.

Owns: the check for lone surrogates, which JSON's escapes can make of a client's text.
"""

from __future__ import annotations

from busllm.errors import InvalidRequest


def utf8(text: str, param: str) -> bytes:
    """A client's text as UTF-8.

    Args:
        param: the field that the text is from.

    Raises:
        InvalidRequest: it has lone surrogates.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text has a lone surrogate (half of a character) at position {error.start}.", param=param
        ) from error
