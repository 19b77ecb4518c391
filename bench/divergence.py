"""How far each number format is from float32 arithmetic on the file's own weights, over a text that everybody has.

    python -m bench.divergence [--tokens 4000]

The reference is `transformers` in float32, the yardstick `transformers` in bfloat16. The texts are the licence of this
repository, pages of Python's language reference and a module of its library, as this Python has them.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import get_args

import msgspec
import torch

from busllm.engine.cpu.kernels import prepare_kernels
from busllm.engine.forward_choice import Quantization
from busllm.engine.loader import LoadConfig, load_runner
from busllm.model_store.resolve import resolve
from busllm.testing.llama_reference import load_llama_reference, reference_logprobs
from busllm.text.tokenizer import load_tokenizer

MODEL = "smollm2-135m"
WINDOW = 512  # tokens that are seen together
PAGES = ("lambda", "typesseq", "class", "exceptions")


class Distance(msgspec.Struct):
    """From the reference, over all tokens so far."""

    divergence: float = 0.0
    num_equal: int = 0
    num_tokens: int = 0

    def add(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        """Log probabilities, float32 (num_tokens, vocab_size) each."""
        self.divergence += float((expected.exp() * (expected - actual)).sum(dim=-1).sum())
        self.num_equal += int((expected.argmax(dim=-1) == actual.argmax(dim=-1)).sum())
        self.num_tokens += len(expected)

    @property
    def line(self) -> str:
        """Mean divergence, and the share of tokens with the same most likely successor."""
        return f"{self.divergence / self.num_tokens:.5f} | {100 * self.num_equal / self.num_tokens:.1f} % |"


def texts() -> tuple[str, str, str]:
    """Law, documentation, source code."""
    licence = (Path(__file__).parents[1] / "LICENSE").read_text()
    return licence, "\n".join(topics[page] for page in PAGES), inspect.getsource(heapq)


def windows(num_tokens: int) -> Iterator[list[int]]:
    """A third of the tokens from each text, in pieces."""
    encoded = load_tokenizer(resolve(MODEL)).encode_batch(list(texts()), add_special_tokens=False)
    for ids in encoded:
        chosen = list(ids)[: num_tokens // len(encoded)]
        yield from (chosen[start : start + WINDOW] for start in range(0, len(chosen), WINDOW))


def main() -> None:
    """Measures every format that can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    arguments = parser.parse_args()
    files = resolve(MODEL)
    prepare_kernels()
    from busllm.engine.cpu.one_sequence import logits_of

    formats = get_args(Quantization)
    reference = load_llama_reference(files)
    in_bfloat16 = load_llama_reference(files).bfloat16()
    decoders = {
        name: load_runner(files, LoadConfig(device="cpu", attention="cpu", quantization=name))._decoder
        for name in formats
    }
    distances = {name: Distance() for name in (*formats, "transformers in bfloat16")}
    for ids in windows(arguments.tokens):
        expected = reference_logprobs(reference, ids)
        distances["transformers in bfloat16"].add(expected, reference_logprobs(in_bfloat16, ids))
        for name, decoder in decoders.items():
            distances[name].add(expected, logits_of(decoder, ids).log_softmax(dim=-1))  # type: ignore[arg-type]
    print(f"{distances['auto'].num_tokens} tokens")
    print("| weights | mean KL | most likely token equal |\n|---|---|---|")
    for name, distance in distances.items():
        print(f"| {name} | {distance.line}")


if __name__ == "__main__":
    main()
