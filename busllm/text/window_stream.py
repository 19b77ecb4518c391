"""Incremental decoding for every tokenizer, on `tokenizers.DecodeStream`.

Owns: `WindowStream`: where the library's stream begins (inside the prompt, so that a first word has its blank), what
it still holds, and how it goes on after it has refused.
Does not know: stop strings. Tokenizers whose tokens are bytes take the simpler `byte_stream.py`.
Next on the path: `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_INVALID = "\N{REPLACEMENT CHARACTER}"
# No character is that long: bytes that are still incomplete then are invalid. It bounds the window that is decoded.
_MAX_WAITING_IDS = 32


class WindowStream:
    """`StreamDecoder` that decodes a window of ids and takes what is new.

    Args:
        tokenizer: the library's tokenizer.
        prompt_tail_ids: the last ids of the prompt.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        tail = list(prompt_tail_ids)
        num_context = self._last_boundary(tail)
        # The ids whose text is out already, and those that came after: the same window as the library's stream has.
        self._context, self._waiting = tail[:num_context], tail[num_context:]
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        for token_id in self._waiting:
            self._stream.step(tokenizer, token_id)
        # What the prompt's incomplete character is worth when the answer does not complete it: it is the prompt's.
        self._prompt_rest = self._rest() if self._waiting else ""

    def step(self, token_id: int) -> str:
        self._waiting.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            # Byte-fallback decoders judge a run of byte tokens as a whole: a bad byte makes good ones before it bad
            # too. What is out is out; the stream begins again behind it.
            return self._restart(self._decode(self._waiting))
        if text is not None:
            self._context, self._waiting = self._waiting, []
            return self._without_prompt(text)
        if len(self._waiting) > _MAX_WAITING_IDS:
            return self._restart(self._rest())
        return ""

    def flush(self) -> str:
        text = self._rest() if self._waiting else ""
        self._waiting = []
        return self._without_prompt(text)

    def _restart(self, text: str) -> str:
        self._context, self._waiting = self._waiting, []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)
        return self._without_prompt(text)

    def _rest(self) -> str:
        """The text of the waiting ids behind that of the context."""
        before = self._decode(self._context)
        whole = self._decode(self._context + self._waiting)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._waiting)

    def _last_boundary(self, ids: list[int]) -> int:
        """The largest number of first ids that end with a whole character; 0 when there is none."""
        for num_ids in range(len(ids), 0, -1):
            if not self._decode(ids[:num_ids]).endswith(_INVALID):
                return num_ids
        return 0

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _without_prompt(self, text: str) -> str:
        if not self._prompt_rest or not text:
            return text
        rest, self._prompt_rest = self._prompt_rest, ""
        return text.removeprefix(rest)
