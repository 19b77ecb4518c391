"""A small engine without a model, driven and watched: plans are kept, pages checked, outputs joined."""

from __future__ import annotations

from typing import Any

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.null import NullRunner
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.description import NULL_EOS_TOKEN_ID, NULL_VOCAB_SIZE
from busllm.plan import StepPlan
from busllm.testing.engine_driver import EngineDriver
from busllm.testing.recording_runner import RecordingRunner
from busllm.text.null_tokenizer import NullTokenizer
from busllm.text.vocabulary import vocabulary_of

_SIZES = {"num_pages": 1024, "page_tokens": 4, "step_tokens": 32, "max_running": 8, "expected_output_tokens": 8}


def null_grammars() -> GrammarCompiler:
    """Grammars of the null model."""
    return GrammarCompiler(lambda: vocabulary_of(NullTokenizer(), NULL_VOCAB_SIZE, (NULL_EOS_TOKEN_ID,)))


class NullEngineDriver(EngineDriver):
    """Drives an engine on a `NullRunner`.

    Args:
        depth, eos_one_in, max_context_tokens: of the runner.
        grammars: of runner and engine; None = new ones.
        config: fields of `EngineConfig` that are not to have this driver's small defaults.
    """

    def __init__(
        self,
        depth: int = 0,
        *,
        eos_one_in: int | None = None,
        max_context_tokens: int = 8192,
        grammars: GrammarCompiler | None = None,
        **config: Any,
    ) -> None:
        grammars = grammars or null_grammars()
        runner = NullRunner(
            depth=depth, eos_one_in=eos_one_in, max_context_tokens=max_context_tokens, grammars=grammars
        )
        self.runner = RecordingRunner(runner)
        super().__init__(Engine(self.runner, EngineConfig(**{**_SIZES, **config}), grammars))

    @property
    def last_plan(self) -> StepPlan:
        """The plan launched last."""
        return self.runner.plans[-1]

    @property
    def is_idle(self) -> bool:
        """Whether the engine has come back to its baseline: no sequence, no page in use."""
        statistics = self.engine.statistics()
        self.engine.check_integrity()
        return (statistics.running, statistics.waiting, statistics.pages_owned) == (0, 0, 0) and not self.engine.live()

    def steps_until(self, uid: str, event: str, max_steps: int = 1_000) -> int:
        """Steps until an event of a request; returns how many it took."""
        for count in range(max_steps):
            if event in self.names(uid):
                return count
            self.step()
        raise AssertionError(f"no {event} of {uid} in {max_steps} steps")

    def step_until_output(self, uid: str, num_tokens: int, choice: int = 0) -> None:
        """Steps until a sequence has at least so many tokens."""
        while len(self.records[uid, choice].output) < num_tokens:
            self.step()
