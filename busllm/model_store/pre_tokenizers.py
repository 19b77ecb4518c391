"""How byte-level BPE models cut text into words before they merge bytes, by the name that a GGUF gives the method.

Owns: the table of methods. A GGUF has only a name; the rule is known from the model that the name comes from.
Does not know: vocabularies (`gguf_tokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

# GPT-4's rule with up to three digits in a group, as Llama 3 uses it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(msgspec.Struct, frozen=True):
    """One method.

    Attributes:
        pattern: regular expression of a word; None = GPT-2's own, which byte-level tokenizers have built in.
        splits_digits: every digit is a word of its own, before anything else.
        normalizes_nfc: the text is brought to Unicode's composed form first.
        ignores_merges: a word that is a token as a whole is taken as that, whatever its merges give.
        adds_bos: such models begin a text with BOS unless the file says otherwise.
    """

    pattern: str | None = None
    splits_digits: bool = False
    normalizes_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def json(self) -> dict[str, Any]:
        """The `pre_tokenizer` entry of `tokenizer.json`."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": self.pattern is None,
        }
        before: list[dict[str, Any]] = []
        if self.splits_digits:
            before.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            pattern = {"Regex": self.pattern}
            before.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        return {"type": "Sequence", "pretokenizers": [*before, byte_level]} if before else byte_level


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(splits_digits=True)
_LLAMA_BPE = PreTokenizer(pattern=_LLAMA3, ignores_merges=True, adds_bos=True)
_QWEN = PreTokenizer(pattern=_QWEN2, normalizes_nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": _GPT2,
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "refact": _DIGITS,
        "llama-bpe": _LLAMA_BPE,
        "llama3": _LLAMA_BPE,
        "qwen2": _QWEN,
        "deepseek-r1-qwen": _QWEN,
        "tekken": PreTokenizer(pattern=_TEKKEN, ignores_merges=True, adds_bos=True),
    }
)
