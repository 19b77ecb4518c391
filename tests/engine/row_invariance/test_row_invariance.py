"""A row has the same bits in every company: tokens and log probabilities are those of the request alone.

Every test runs for every cell of `cells.py`, and compares with each request's answer when it has the engine to itself,
its prompt is computed in one piece, and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from busllm.engine.loader import load_runner
from busllm.engine.model_runner import ModelRunner
from busllm.engine.sequence import SequenceRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.testing.engine_driver import sequence_request
from busllm.testing.plan_driver import DrivenSequence, PlanDriver
from busllm.text.vocabulary import load_vocabulary
from tests.engine.row_invariance.cells import CELLS, DEFAULT_MODEL, Cell
from tests.engine.row_invariance.requests import (
    MAX_TOKENS,
    PAGE_TOKENS,
    Answer,
    alone,
    answers,
    make_engine,
    make_requests,
)

CHUNKS = (1, 7, 13, 29, 31, 63, 65)


@dataclass(frozen=True)
class Loaded:
    """A model, what it is asked, and what it answers to each alone."""

    runner: ModelRunner
    grammars: GrammarCompiler
    requests: list[SequenceRequest]
    expected: dict[str, Answer]

    @property
    def without_grammar(self) -> list[SequenceRequest]:
        """The requests that plans of our own can carry to their end."""
        return [request for request in self.requests if request.params.grammar is None]


@pytest.fixture(scope="module", params=CELLS)
def cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    """On one thread: steps take microseconds, and on a busy machine threads that wait for each other take seconds."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def loaded(cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    files = cell.files(tmp_path_factory.mktemp("cell"))
    grammars = GrammarCompiler(lambda: load_vocabulary(files))
    runner = load_runner(files, cell.load_config, grammars=grammars)
    requests = make_requests(49152 if cell.model == DEFAULT_MODEL else 256)
    yield Loaded(runner, grammars, requests, alone(make_engine(runner, grammars, prefix_cache=False), requests))
    runner.close()


def driven(request: SequenceRequest, **how: object) -> DrivenSequence:
    """The request as a sequence whose chunks and pages a test chooses."""
    return DrivenSequence(request.prompt_ids.tolist(), request.params, request.seed, **how)  # type: ignore[arg-type]


def assert_expected(loaded: Loaded, requests: list[SequenceRequest], done: tuple[DrivenSequence, ...]) -> None:
    actual = {r.uid: Answer(s.output, s.logprobs) for r, s in zip(requests, done, strict=True)}
    assert actual == {request.uid: loaded.expected[request.uid] for request in requests}


def test_every_request_has_an_answer_of_its_own(loaded: Loaded) -> None:
    """Else equality would show nothing."""
    assert len({tuple(answer.output) for answer in loaded.expected.values()}) == len(loaded.requests)
    assert all(len(answer.output) == len(answer.logprobs) == MAX_TOKENS for answer in loaded.expected.values())


def test_in_one_batch(loaded: Loaded) -> None:
    assert answers(make_engine(loaded.runner, loaded.grammars), loaded.requests) == loaded.expected


@pytest.mark.parametrize("shift", [0, 3])
def test_in_chunks_of_odd_sizes_beside_sequences_that_come_and_go(loaded: Loaded, shift: int) -> None:
    requests = loaded.without_grammar
    sequences = [
        driven(request, chunk_tokens=CHUNKS[(index + shift) % len(CHUNKS)], start_step=2 * index)
        for index, request in enumerate(requests)
    ]
    assert_expected(loaded, requests, PlanDriver(loaded.runner).run(*sequences))


def test_from_a_cached_prefix_of_any_length(loaded: Loaded) -> None:
    driver = PlanDriver(loaded.runner)
    long = [request for request in loaded.without_grammar if len(request.prompt_ids) > PAGE_TOKENS]
    sources = driver.run(*(driven(request) for request in long))
    requests, sequences = [], []
    for request, source in zip(long, sources, strict=True):
        most = (len(request.prompt_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
        for num_tokens in {PAGE_TOKENS, min(4 * PAGE_TOKENS, most), most}:
            requests.append(request)
            sequences.append(driven(request, cached=(source, num_tokens)))
    for request, sequence in zip(requests, driver.run(*sequences), strict=True):
        assert Answer(sequence.output, sequence.logprobs) == loaded.expected[request.uid]


def test_with_a_prefix_that_the_engine_finds_in_its_cache(loaded: Loaded) -> None:
    driver = make_engine(loaded.runner, loaded.grammars)
    answers(driver, loaded.requests)
    again = [sequence_request(f"{r.uid}-again", r.prompt_ids.tolist(), r.params, seed=r.seed) for r in loaded.requests]
    assert list(answers(driver, again).values()) == list(loaded.expected.values())
    assert driver.engine.statistics().cached_prompt_tokens > 0


def test_after_retraction(loaded: Loaded) -> None:
    driver = make_engine(loaded.runner, loaded.grammars, num_pages=20, step_tokens=37, expected_output_tokens=0)
    assert answers(driver, loaded.requests) == loaded.expected
    assert driver.engine.statistics().retractions > 0


def test_after_sending_on(loaded: Loaded) -> None:
    """To another engine, which gets the first few tokens: one, up to the end of a page, all but one."""
    later = {}
    for request in loaded.requests:
        output = loaded.expected[request.uid].output
        to_page = PAGE_TOKENS - len(request.prompt_ids) % PAGE_TOKENS
        for kept in {1, min(to_page, len(output) - 2), len(output) - 1}:
            uid, prompt = f"{request.uid}-after-{kept}", request.prompt_ids.tolist()
            later[uid] = (
                sequence_request(uid, prompt, request.params, seed=request.seed, attempt=2, output=output[:kept]),
                (request.uid, kept),
            )
    sent_on = answers(
        make_engine(loaded.runner, loaded.grammars, step_tokens=45), [request for request, _ in later.values()]
    )
    for uid, (_, (origin, kept)) in later.items():
        expected = loaded.expected[origin]
        assert sent_on[uid] == Answer(expected.output, expected.logprobs[kept:]), uid
