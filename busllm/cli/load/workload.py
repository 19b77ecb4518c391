"""The requests of a load: seeded, so that every server gets the same.

Owns: `Workload` and the prompts that are made from it.
Does not know: tokenizers. A word of these lists is about one token for most models; what a server counted is reported.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

# Short, frequent, different in their first letters: nearly every vocabulary has each, with its blank, as one token.
_WORDS_TEXT = """
about after again air all also animal another answer any around ask away back because before best better big black
book both boy bring build but call came change city close cold come could country day different does door down each
early earth end enough even every example eye face far father feet few find fire first five follow food form four
friend from game give good great green group grow half hand hard head hear help here high home horse house idea just
keep kind know land large last late learn leave left letter life light line list little live long look made main
make many mark may mean men might mile money more morning most mother move much music must name near need never new
next night north note number off often old once only open order other over own page paper part people place plan
plant play point power press problem put question quick rain read real red rest right river road rock room round
rule run same say school sea second see seem set several ship short show side simple sing six size sleep small snow
some song soon sound south space spell stand star start state still stop story street strong study such sun sure
table take talk teach tell ten test than thing think those thought three through time together told town travel tree
true try turn two under unit until use very voice walk want war warm watch water way week well west what wheel where
while white whole wind winter with wonder wood word work world write year young
"""
_WORDS = tuple(_WORDS_TEXT.split())
_WARMUP_INPUT, _WARMUP_OUTPUT = 32, 8
_SHORTEST = 4
_SHORTEST_SHARE = 4  # with `spread` the shortest prompt and answer are a quarter of the longest


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    Attributes:
        requests: how many.
        input_words: words per prompt; with `spread` at most.
        output_tokens: tokens per answer; with `spread` at most.
        shared_words: words at the beginning that all prompts share.
        spread: lengths are drawn evenly between a quarter and the whole.
        warmup: requests before the clock starts.
        chat: chat completions, else text completions.
        temperature: 0 = greedy.
        top_p: None = the server's default.
        ignore_eos: answers have exactly the length asked for, where the server knows this extension.
        seed: of texts and lengths.
        arriving_words: words of one long prompt that arrives when all others run; None = there is none.
        arriving_output_tokens: tokens of its answer.
    """

    requests: int = 32
    input_words: int = 128
    output_tokens: int = 64
    shared_words: int = 0
    spread: bool = False
    warmup: int = 2
    chat: bool = False
    temperature: float = 0.0
    top_p: float | None = None
    ignore_eos: bool = True
    seed: int = 7
    arriving_words: int | None = None
    arriving_output_tokens: int = 96

    @property
    def path(self) -> str:
        """Where the requests go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def bodies(self, model: str) -> list[bytes]:
        """The measured requests."""
        rng = random.Random(self.seed)
        shared = _text(rng, self.shared_words)
        bodies = []
        for number in range(self.requests):
            own = _text(rng, self._drawn(rng, self.input_words))
            prompt = " ".join(part for part in (shared, str(number), own) if part)  # numbered: no two are alike
            bodies.append(self._body(model, prompt, self._drawn(rng, self.output_tokens)))
        return bodies

    def warmup_bodies(self, model: str) -> list[bytes]:
        """Short requests that share nothing with the measured ones."""
        rng = random.Random(~self.seed)
        return [self._body(model, _text(rng, _WARMUP_INPUT), _WARMUP_OUTPUT) for _ in range(self.warmup)]

    def arriving_body(self, model: str) -> bytes | None:
        """The long request, which shares nothing with the others; None when there is none."""
        if self.arriving_words is None:
            return None
        rng = random.Random(f"arriving {self.seed}")
        return self._body(model, _text(rng, self.arriving_words), self.arriving_output_tokens)

    def _drawn(self, rng: random.Random, longest: int) -> int:
        if not self.spread:
            return longest
        return rng.randint(min(longest, max(_SHORTEST, longest // _SHORTEST_SHARE)), longest)

    def _body(self, model: str, prompt: str, max_tokens: int) -> bytes:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **asked,
        }
        if self.top_p is not None:
            body["top_p"] = self.top_p
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))
