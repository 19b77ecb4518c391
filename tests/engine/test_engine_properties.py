"""Random lives of many sequences: whatever happens, each gets exactly the tokens that it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.engine.sequence import FinishReason, SequenceRequest, SequenceState
from busllm.errors import NeverFits, QueueFull
from busllm.sampling import SamplingParams, choice_seed
from busllm.testing.engine_driver import EngineDriver, null_outcome, sequence_request

EOS_ONE_IN = 12
CONTEXT = 60

# Prompts are beginnings of three texts, with an own ending: many share a prefix of any length.
TEXTS = [[65 + (7 * text + i * i) % 26 for i in range(48)] for text in range(3)]
prompts = st.builds(
    lambda text, length, ending: TEXTS[text][:length] + ending,
    st.integers(0, 2),
    st.sampled_from([0, 1, 5, 15, 16, 17, 31, 32, 33, 48]),
    st.lists(st.integers(97, 99), max_size=3),
).filter(bool)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(0, 40),
    stop_token_ids=st.sampled_from([(), (101,), tuple(range(48, 60))]),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
    prompt_logprobs=st.none() | st.integers(0, 2),
)


class EngineLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.num_uids = 0
        self.requests: dict[tuple[str, int], SequenceRequest] = {}
        self.cut_short: set[tuple[str, int]] = set()
        self.num_made_elsewhere: dict[tuple[str, int], int] = {}

    @initialize(
        page_tokens=st.sampled_from([1, 2, 16]),
        capacity_tokens=st.sampled_from([48, 64, 80, 160, 1024]),
        depth=st.integers(0, 1),
        max_running=st.integers(1, 8),
        step_tokens=st.integers(8, 40),
        prefix_cache=st.booleans(),
        expected_output_tokens=st.sampled_from([0, 0, 4, 100]),
        max_prefix_wait_steps=st.sampled_from([0, 3, 50]),
    )
    def start(self, page_tokens: int, capacity_tokens: int, depth: int, **sizes: Any) -> None:
        self.capacity_tokens = capacity_tokens
        runner = NullRunner(depth=depth, eos_one_in=EOS_ONE_IN, max_context_tokens=CONTEXT)
        config = EngineConfig(
            num_pages=capacity_tokens // page_tokens, page_tokens=page_tokens, max_waiting=20, **sizes
        )
        self.driver = EngineDriver(Engine(runner, config))

    @rule(
        arrivals=st.lists(st.tuples(prompts, params), min_size=1, max_size=4),
        num_choices=st.sampled_from([1, 1, 1, 3]),
        seed=st.integers(0, 3),
        priority=st.integers(0, 1),
    )
    def submit(
        self, arrivals: list[tuple[list[int], SamplingParams]], num_choices: int, seed: int, priority: int
    ) -> None:
        for prompt, params in arrivals:
            self.num_uids += 1
            for choice in range(num_choices):
                self.submit_choice(
                    sequence_request(
                        *(f"uid{self.num_uids}", prompt, params),
                        choice=choice,
                        seed=choice_seed(seed, choice),
                        priority=priority,
                    )
                )

    def submit_choice(self, request: SequenceRequest) -> None:
        try:
            self.driver.submit(request)
        except QueueFull:
            return
        except NeverFits:
            assert len(request.prompt_ids) > self.capacity_tokens
            return
        self.requests[request.uid, request.choice] = request

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @rule()
    def one_step(self) -> None:
        self.driver.step()

    def live_keys(self) -> list[tuple[str, int]]:
        ended = self.cut_short
        return [key for key, record in self.driver.records.items() if not record.finish_reason and key not in ended]

    @precondition(lambda self: self.live_keys())
    @rule(data=st.data(), up_to_attempt=st.none() | st.integers(0, 3))
    def abort(self, data: st.DataObject, up_to_attempt: int | None) -> None:
        uid, _ = data.draw(st.sampled_from(self.live_keys()))
        affected = [
            key
            for key in self.live_keys()
            if key[0] == uid and (up_to_attempt is None or self.driver.records[key].attempt <= up_to_attempt)
        ]
        assert self.driver.engine.abort(uid, up_to_attempt) <= len(affected)
        self.cut_short.update(affected)

    @precondition(lambda self: self.live_keys())
    @rule(data=st.data(), attempt_ahead=st.integers(-1, 1))
    def stop(self, data: st.DataObject, attempt_ahead: int) -> None:
        key = data.draw(st.sampled_from(self.live_keys()))
        attempt = self.driver.records[key].attempt + attempt_ahead
        if self.driver.engine.stop(*key, attempt):
            assert attempt_ahead == 0
            self.cut_short.add(key)

    @precondition(lambda self: self.live_keys())
    @rule(data=st.data(), missing=st.integers(0, 4), diverges=st.booleans())
    def send_on(self, data: st.DataObject, missing: int, diverges: bool) -> None:
        key = data.draw(st.sampled_from(self.live_keys()))
        record = self.driver.records[key]
        first = self.requests[key]
        # Owners never forget what another engine made for them.
        output = record.output[: max(self.num_made_elsewhere.get(key, 0), len(record.output) - missing)]
        if diverges and output:
            self.num_made_elsewhere[key] = len(output)
            output[-1] = 33 + (output[-1] + 1) % 10
        self.requests[key] = sequence_request(
            *(key[0], first.prompt_ids.tolist(), first.params),
            choice=key[1],
            attempt=record.attempt + 1,
            output=output,
            seed=first.seed,
            priority=first.priority,
        )
        self.driver.submit(self.requests[key])

    @precondition(lambda self: self.live_keys())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.driver.engine.hold(data.draw(st.sets(st.sampled_from(self.live_keys()))))

    @rule()
    def reset_cache(self) -> None:
        self.driver.engine.reset_cache()
        self.driver.engine.check_integrity()

    @invariant()
    def progress_tells_what_was_delivered(self) -> None:
        if not self.requests:
            return
        for uid, attempt in self.driver.engine.live():
            entries = self.driver.engine.progress(uid)
            assert attempt in {entry.attempt for entry in entries}
            for entry in entries:
                record = self.driver.records[uid, entry.choice]
                assert entry.next_index >= len(record.output)
                assert entry.state in SequenceState

    def teardown(self) -> None:
        if not self.num_uids:
            return
        self.driver.engine.hold(())
        self.driver.run(max_steps=5_000)
        statistics = self.driver.engine.statistics()
        assert (statistics.running, statistics.waiting, statistics.pages_owned) == (0, 0, 0)
        assert self.driver.engine.live() == []
        for key, request in self.requests.items():
            self.compare_with_definition(key, request)

    def compare_with_definition(self, key: tuple[str, int], request: SequenceRequest) -> None:
        record = self.driver.records[key]
        output, reason = null_outcome(request, max_context_tokens=CONTEXT, eos_one_in=EOS_ONE_IN)
        if key in self.cut_short and record.finish_reason is None:
            assert record.output == output[: len(record.output)]
            return
        if record.finish_reason is FinishReason.LENGTH and len(record.output) < len(output):
            # Only a sequence that has outgrown the whole pool may end early.
            assert len(request.prompt_ids) + len(record.output) > self.capacity_tokens
            output = output[: len(record.output)]
            reason = FinishReason.LENGTH
        assert record.output == output
        assert record.finish_reason is reason
        if request.params.logprobs is not None:
            assert len(record.logprobs) == len(output) - len(request.output_ids)
        if request.params.prompt_logprobs is not None and not len(request.output_ids):
            assert record.prompt_logprobs is not None
            assert len(record.prompt_logprobs) == len(request.prompt_ids)


def run_life(max_examples: int, stateful_step_count: int) -> None:
    run_state_machine_as_test(
        EngineLife,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=stateful_step_count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_happens_every_sequence_gets_the_tokens_that_it_gets_alone() -> None:
    run_life(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
def test_whatever_happens_for_thousands_of_steps_every_sequence_gets_its_tokens() -> None:
    run_life(max_examples=1_000, stateful_step_count=80)
