"""A decision costs what it is about: not the number of sequences that wait, nor the size of the prefix cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.grammar_wait import GrammarWait
from busllm.engine.live_sequence import LiveSequence
from busllm.engine.null import NullRunner
from busllm.engine.pages import PagePool
from busllm.engine.radix import Node, RadixTree
from busllm.engine.sequence import SequenceRequest, SequenceTokens
from busllm.grammar.compiler import CompiledGrammar, GrammarCompiler
from busllm.model_store.description import NULL_EOS_TOKEN_ID, NULL_VOCAB_SIZE
from busllm.sampling import Grammar, GrammarKind, SamplingParams
from busllm.testing.engine_driver import sequence_request
from busllm.testing.looked_at import looked_at
from busllm.text.null_tokenizer import NullTokenizer
from busllm.text.vocabulary import vocabulary_of

FEW, MANY = 50, 5_000
PAGE_TOKENS = 16
NUM_RUNNING = 4
ENDLESS = SamplingParams(temperature=0.0, max_tokens=4_000, ignore_eos=True)


def prompt(number: int, num_tokens: int, shared: int = 0) -> list[int]:
    """A prompt of its own after a beginning of `shared` tokens that all have."""
    own = [32 + (number >> (6 * digit)) % 64 for digit in range(4)]
    return ([40] * shared + own + [50] * num_tokens)[:num_tokens]


def request(number: int, num_tokens: int = 40, *, shared: int = 0, priority: int = 0) -> SequenceRequest:
    text = prompt(number, num_tokens, shared)
    return sequence_request(f"u{number}", text, ENDLESS, priority=priority)


def engine(num_running: int = NUM_RUNNING, num_pages: int = 4_000, step_tokens: int = 64) -> Engine:
    config = EngineConfig(
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_running=num_running,
        step_tokens=step_tokens,
        max_waiting=10**6,
        expected_output_tokens=1_000,
    )
    return Engine(NullRunner(check_plans=False), config)


def slots_are_taken(num_waiting: int) -> Engine:
    made = engine()
    for number in range(NUM_RUNNING + num_waiting):
        made.submit(request(number))
    return made


def priorities_are_mixed(num_waiting: int) -> Engine:
    made = engine()
    for number in range(NUM_RUNNING + num_waiting):
        made.submit(request(number, priority=number % 3 - 1))
    return made


def pages_are_promised(num_waiting: int) -> Engine:
    made = engine(num_running=64, num_pages=300)
    for number in range(NUM_RUNNING + num_waiting):
        made.submit(request(number))
    return made


def a_prefix_is_being_computed(num_waiting: int) -> Engine:
    made = engine(num_running=16, step_tokens=16)
    for number in range(1 + num_waiting):
        made.submit(request(number, 1_000, shared=900))
    return made


def most_are_held_back(num_waiting: int) -> Engine:
    made = slots_are_taken(num_waiting)
    made.hold([(f"u{number}", 0) for number in range(NUM_RUNNING, NUM_RUNNING + num_waiting)])
    return made


CROWDS = [slots_are_taken, priorities_are_mixed, pages_are_promised, a_prefix_is_being_computed, most_are_held_back]
Crowd = Callable[[int], Engine]


def num_looked_at(made: Engine, what: Callable[[Engine], object]) -> int:
    with looked_at(LiveSequence) as seen:
        what(made)
    return len(seen)


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_step_looks_at_as_many_sequences_however_many_wait(crowd: Crowd) -> None:
    counts = []
    for num_waiting in (FEW, MANY):
        made = crowd(num_waiting)
        for _ in range(3):
            made.step()
        assert made.statistics().waiting > num_waiting - 20
        counts.append([num_looked_at(made, Engine.step) for _ in range(20)])
    assert counts[0] == counts[1]
    assert max(counts[1]) <= 20


@pytest.mark.parametrize("crowd", CROWDS)
def test_coming_and_going_touches_one_sequence_however_many_wait(crowd: Crowd) -> None:
    made = crowd(MANY)
    made.step()
    last = NUM_RUNNING + MANY
    assert num_looked_at(made, lambda it: it.submit(request(last))) == 1
    assert num_looked_at(made, lambda it: it.abort(f"u{last}")) == 1
    assert num_looked_at(made, lambda it: it.stop(f"u{last - NUM_RUNNING - 1}", 0, 1)) == 1


def test_holding_one_more_touches_one_sequence_however_many_are_held() -> None:
    made = slots_are_taken(MANY)
    held = [(f"u{number}", 0) for number in range(NUM_RUNNING, MANY)]
    made.hold(held)
    assert num_looked_at(made, lambda it: it.hold([*held, ("u0", 0)])) == 1
    assert num_looked_at(made, lambda it: it.hold([*held[1:], ("u0", 0)])) == 1


def test_unsaid_tokens_are_taken_back_without_a_look_at_those_of_others() -> None:
    """After a bus gap many come again at once with what their owners have, and may leave before the next turn."""
    made = engine(num_running=64, num_pages=8_000, step_tokens=4_096)
    for number in range(64):
        made.submit(request(number))
    made.step()
    made.step()
    for number in range(64):
        made.submit(sequence_request(f"u{number}", prompt(number, 40), ENDLESS, attempt=2))
    with looked_at(SequenceTokens) as seen:
        for number in range(63):
            made.abort(f"u{number}")
    assert len(seen) == 0
    (tokens,) = (entry for entry in made.step().tokens if entry.index == 0)
    assert (tokens.uid, len(tokens.token_ids)) == ("u63", 2)


# ---------------------------------------------------------------- grammars


class PatientCompiler(GrammarCompiler):
    """Compiles nothing before it may."""

    def __init__(self) -> None:
        super().__init__(lambda: vocabulary_of(NullTokenizer(), NULL_VOCAB_SIZE, (NULL_EOS_TOKEN_ID,)))
        self.may_go_on = threading.Event()

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        self.may_go_on.wait()
        return super().compiled(grammar)


@pytest.fixture
def patient() -> Iterator[PatientCompiler]:
    compiler = PatientCompiler()
    yield compiler
    compiler.may_go_on.set()  # else its thread, and the tests, would never end


def test_a_step_looks_at_the_grammars_that_are_done_and_not_at_those_that_are_not(patient: PatientCompiler) -> None:
    waiting = GrammarWait(patient)
    digits = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[0-9]+"))
    sequences = [LiveSequence(sequence_request(f"u{number}", [65], digits), number, (), 100) for number in range(MANY)]
    for seq in sequences:
        waiting.begin(seq)
    with looked_at(Future) as futures:
        assert waiting.take_ready() == []
    assert len(futures) == 0
    for seq in sequences[1:]:
        waiting.discard(seq)
    patient.may_go_on.set()
    ready = []
    while not ready:
        ready = waiting.take_ready()
    assert ready == [(sequences[0], None)]
    assert not waiting
    waiting.close()


# ---------------------------------------------------------------- the prefix cache


class FullCache:
    """A tree that holds prompts of `pages_each` pages until its pool is full; nobody uses any of them."""

    def __init__(self, num_pages: int, pages_each: int = 16) -> None:
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(PAGE_TOKENS, self.pool)
        self.num_prompts = num_pages // pages_each
        self.pages_each = pages_each
        for number in range(self.num_prompts):
            self.store(number)

    def ids(self, number: int) -> bytes:
        return np.arange(self.pages_each * PAGE_TOKENS, dtype="<i4").tobytes()[4:] + number.to_bytes(4, "little")

    def key(self, number: int, index: int) -> bytes:
        """Every page of a prompt differs from those of all others."""
        return number.to_bytes(4, "little") + index.to_bytes(4, "little") + bytes(4 * PAGE_TOKENS - 8)

    def store(self, number: int) -> None:
        node = None
        for index in range(self.pages_each):
            (page,) = self.pool.allocate(1)
            node, _ = self.tree.insert(b"", node, self.key(number, index), page)
        self.tree.unlock(node)

    def match(self, number: int) -> Node | None:
        ids = b"".join(self.key(number, index) for index in range(self.pages_each))
        return self.tree.match(b"", ids, self.pages_each)


@pytest.fixture(scope="module", params=[1_600, 62_500 // 16 * 16], ids=["25k tokens", "1M tokens"])
def cache(request: pytest.FixtureRequest) -> FullCache:
    return FullCache(request.param)


def test_a_match_visits_the_pages_of_its_prompt_only(cache: FullCache) -> None:
    with looked_at(Node) as seen:
        node = cache.match(cache.num_prompts // 2)
    assert node is not None
    assert len(seen) == cache.pages_each


def test_locking_and_unlocking_visit_the_pages_of_the_prefix_only(cache: FullCache) -> None:
    node = cache.match(cache.num_prompts // 2)
    with looked_at(Node) as seen:
        cache.tree.lock(node)
        cache.tree.unlock(node)
    assert len(seen) == cache.pages_each


def test_in_a_full_cache_eviction_visits_what_it_frees_and_the_page_above(cache: FullCache) -> None:
    with looked_at(Node) as seen:
        assert cache.tree.evict(cache.pages_each) == cache.pages_each
    assert len(seen) == cache.pages_each
    with looked_at(Node) as seen:
        cache.store(cache.num_prompts)
    assert len(seen) == cache.pages_each
    assert cache.pool.num_free == 0
    assert cache.match(cache.num_prompts) is not None
