"""What decisions of the engine cost, by the number of waiting sequences.

Owns: engines with a crowd before them, without a model.
Does not know: the prefix cache by itself (`prefix_cache.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from bench.scaling.figure import Figure, curves
from bench.scaling.timing import cpu_us
from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.engine.sequence import SequenceRequest
from busllm.sampling import SamplingParams

WAITING = (10, 100, 1_000, 10_000)
CACHE_TOKENS = 1_000_000
PAGE_TOKENS = 16
NUM_RUNNING = 64
PROMPT_TOKENS = 500
ENDLESS = SamplingParams(temperature=0.0, max_tokens=4_000, ignore_eos=True)
_PRINTABLE = 95


class Crowd:
    """An engine with `NUM_RUNNING` sequences that generate, and others that wait.

    Args:
        num_waiting: how many these are.
        priorities: given to them in turns.
        shared_tokens: their prompts begin with so many equal tokens.
        num_pages: of the pool.
        num_slots: of the engine; more than are running, when something else than a slot is to be missing.
    """

    def __init__(
        self,
        num_waiting: int,
        *,
        priorities: tuple[int, ...] = (0,),
        shared_tokens: int = 0,
        num_pages: int = CACHE_TOKENS // PAGE_TOKENS,
        num_slots: int = NUM_RUNNING,
    ) -> None:
        config = EngineConfig(
            num_pages=num_pages, page_tokens=PAGE_TOKENS, max_running=num_slots, max_waiting=10**6,
            expected_output_tokens=1_000,
        )  # fmt: skip
        self.engine = Engine(NullRunner(check_plans=False), config)
        self._source = np.random.default_rng(0)
        self._shared = self._ids(shared_tokens)
        self._numbers = itertools.count()
        self._priorities = itertools.cycle(priorities)
        for _ in range(NUM_RUNNING if num_slots == NUM_RUNNING else 1):
            self.engine.submit(self.request())
        if not shared_tokens:
            for _ in range(200):
                self.engine.step()
        self.waiting = [self.arrive() for _ in range(num_waiting)]
        for _ in range(3):
            self.engine.step()

    def _ids(self, num_tokens: int) -> np.ndarray:
        return self._source.integers(32, 32 + _PRINTABLE, num_tokens).astype(np.int32)

    def request(self) -> SequenceRequest:
        """The next one, with a prompt of its own behind what is shared."""
        own = self._ids(PROMPT_TOKENS)
        prompt = np.concatenate([self._shared, own])
        uid = f"u{next(self._numbers)}"
        return SequenceRequest(
            uid, 0, 1, prompt, np.zeros(0, np.int32), ENDLESS, 1, next(self._priorities), b""
        )  # fmt: skip

    def arrive(self) -> str:
        """Submits one; returns its uid."""
        request = self.request()
        self.engine.submit(request)
        return request.uid


def _prefix_crowd(num_waiting: int) -> Crowd:
    # One computes a prefix that takes hundreds of steps, and as many as there are slots for wait for it.
    return Crowd(num_waiting, shared_tokens=7_000, num_slots=256)


def _held_crowd(num_waiting: int) -> Crowd:
    crowd = Crowd(num_waiting)
    crowd.engine.hold({(uid, 0) for uid in crowd.waiting})
    return crowd


CROWDS: dict[str, Callable[[int], Crowd]] = {
    "all slots are taken": Crowd,
    "three priorities are mixed": lambda num_waiting: Crowd(num_waiting, priorities=(0, 1, 2)),
    "slots are free, all pages are promised": lambda num_waiting: Crowd(num_waiting, num_pages=3_000, num_slots=256),
    "a prefix that all share is being computed": _prefix_crowd,
    "all that wait are held back": _held_crowd,
}


def figures() -> Iterator[Figure]:
    """A step, and what happens to single sequences."""
    yield Figure(
        name="planner_step",
        title="A step of the engine without a model, and why others wait",
        x_label="waiting sequences",
        y_label="µs",
        curves=curves(tuple(CROWDS), WAITING, lambda number: [_step_us(make(number)) for make in CROWDS.values()]),
    )
    yield Figure(
        name="planner_decisions",
        title="Decisions about one sequence",
        x_label="waiting sequences",
        y_label="µs",
        curves=curves(
            ("submit", "abort", "hold back and let go"), WAITING, lambda number: _decisions_us(Crowd(number))
        ),
    )


def _step_us(crowd: Crowd) -> float:
    return cpu_us(crowd.engine.step, 40)


def _decisions_us(crowd: Crowd) -> tuple[float, float, float]:
    num_calls = 100
    requests = iter([crowd.request() for _ in range(10 * num_calls)])
    come: list[str] = []

    def submit() -> None:
        request = next(requests)
        crowd.engine.submit(request)
        come.append(request.uid)

    submit_us = cpu_us(submit, num_calls)
    abort_us = cpu_us(lambda: crowd.engine.abort(come.pop()), num_calls)
    key = (crowd.waiting[0], 0)

    def hold() -> None:
        crowd.engine.hold((key,))
        crowd.engine.hold(())

    return submit_us, abort_us, cpu_us(hold, num_calls)
