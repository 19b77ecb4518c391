"""The requests whose answers must not depend on their company, and the answers.

Owns: prompts around the borders of pages and of blocks of keys, with every kind of setting that looks back at the
sequence or draws.
Does not know: which model answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.runner import Runner
from busllm.engine.sequence import SequenceRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.plan import TokenLogprobs
from busllm.sampling import Grammar, GrammarKind, SamplingParams
from busllm.testing.engine_driver import EngineDriver, sequence_request
from tests.engine.tiny import prompts

PAGE_TOKENS = 16
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 127, 128, 129, 145)
MAX_TOKENS = 20
_CODE = Grammar(GrammarKind.REGEX, r"[a-z]{2,6}(-[0-9]{3}){2,20}")
_KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "grammar": _CODE},
    {
        "temperature": 0.9,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
    },
)


class Answer(NamedTuple):
    """Token ids and their log probabilities."""

    output: list[int]
    logprobs: list[TokenLogprobs]


def make_requests(vocab_size: int) -> list[SequenceRequest]:
    """One per length, the kinds in turn."""
    return [
        sequence_request(
            f"of-{len(prompt)}",
            prompt,
            SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3, **_KINDS[index % len(_KINDS)]),
            seed=index,
        )
        for index, prompt in enumerate(prompts(LENGTHS, vocab_size=vocab_size))
    ]


def make_engine(runner: Runner, grammars: GrammarCompiler, **sizes: Any) -> EngineDriver:
    """A fresh engine; everything fits into one step and nobody gives way unless told otherwise."""
    usual = {"num_pages": 256, "page_tokens": PAGE_TOKENS, "step_tokens": 1024, "max_running": len(LENGTHS)}
    config = EngineConfig(max_context_tokens=256, **{**usual, **sizes})
    return EngineDriver(Engine(runner, config, grammars))


def answers(driver: EngineDriver, requests: Sequence[SequenceRequest]) -> dict[str, Answer]:
    """By uid, of requests that are submitted together."""
    for request in requests:
        driver.submit(request)
    driver.run()
    assert not driver.failures
    return {request.uid: answer(driver, request) for request in requests}


def answer(driver: EngineDriver, request: SequenceRequest) -> Answer:
    """One of them."""
    record = driver.records[request.uid, request.choice]
    return Answer(record.output, record.logprobs)


def alone(driver: EngineDriver, requests: Sequence[SequenceRequest]) -> dict[str, Answer]:
    """By uid, of requests that have the engine to themselves, one after the other."""
    return {uid: each for request in requests for uid, each in answers(driver, [request]).items()}
