"""Incremental decoding where every token stands for bytes: byte-level BPE, and the null model.

Owns: `ByteStream`. With such tokenizers the text is exactly the UTF-8 decoding of the tokens' bytes one after the
other, so that decoding as they come is exact and costs the same at every length. (`tokenizers.DecodeStream` decodes a
window of ids twice per token, and a window without end while bytes are invalid.)
Does not know: which bytes a token has.
Next on the path: `decoder.py`.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence

_INVALID = "\N{REPLACEMENT CHARACTER}"


class ByteStream:
    """`StreamDecoder` of bytes.

    A character that the prompt left incomplete may be completed by the answer, and then belongs to it; if it is not,
    what is invalid belongs to the prompt.

    Args:
        bytes_of: the bytes of an id, none for an id that is not to be seen.
        prompt_tail_ids: the last ids of the prompt.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], prompt_tail_ids: Sequence[int]) -> None:
        self._bytes_of = bytes_of
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(b"".join(map(bytes_of, prompt_tail_ids)))
        waiting, _ = self._decoder.getstate()
        self._prompt_rest = _INVALID if waiting else ""

    def step(self, token_id: int) -> str:
        text = self._decoder.decode(self._bytes_of(token_id))
        return self._without_prompt(text) if self._prompt_rest else text

    def flush(self) -> str:
        return self._without_prompt(self._decoder.decode(b"", final=True))

    def _without_prompt(self, text: str) -> str:
        if not text:
            return text
        rest, self._prompt_rest = self._prompt_rest, ""
        return text.removeprefix(rest)
