"""The engine: sequences in, tokens out, one turn at a time.

Owns: the sequences it has been given, by (uid, choice), their attempts and their ends, and what becomes of each
token.
Does not know: the bus, text, threads. It is plain synchronous Python, called from one thread.
Next on the path: `engine/planner.py` decides, `engine/pipeline.py` has it computed; a stage or `busllm.LLM` calls.
"""

from __future__ import annotations

from collections.abc import Collection

from busllm.engine.config import EngineConfig, check_config
from busllm.engine.grammar_wait import GrammarWait
from busllm.engine.intake import can_adopt, check_request
from busllm.engine.live_sequence import Key, LiveSequence
from busllm.engine.outbox import Outbox
from busllm.engine.page_tables import PageTables
from busllm.engine.pipeline import LandedRow, Pipeline
from busllm.engine.planner import Planner
from busllm.engine.runner import Runner
from busllm.engine.sequence import EngineStatistics, FinishReason, SequenceProgress, SequenceRequest, StepOutput
from busllm.errors import BusllmError, QueueFull
from busllm.grammar.compiler import GrammarCompiler

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """Generates for many sequences at once.

    Args:
        runner: executes the plans; it is told to allocate here.
        config: sizes and limits.
        grammars: of the model, the same that the runner has; None = no request may have one.

    Raises:
        ConfigError: the config cannot work.
    """

    def __init__(self, runner: Runner, config: EngineConfig, grammars: GrammarCompiler | None = None) -> None:
        check_config(config)
        self._runner = runner
        self._config = config
        self._max_context_tokens = min(config.max_context_tokens, runner.model.max_context_tokens)
        runner.allocate(
            num_pages=config.num_pages,
            page_tokens=config.page_tokens,
            max_running=config.max_running,
            max_context_tokens=self._max_context_tokens,
        )
        self._outbox = Outbox()
        self._tables = PageTables(config.num_pages, config.page_tokens, config.prefix_cache)
        self._planner = Planner(config, self._tables, self._outbox)
        self._pipeline = Pipeline(runner, self._planner)
        self._grammar_wait = GrammarWait(grammars)
        self._sequences: dict[str, dict[int, LiveSequence]] = {}
        self._held_keys: frozenset[Key] = frozenset()
        self._num_submitted = 0
        self._num_output_tokens = 0
        # Whether the last look found nothing that can be computed: then only a call from outside changes that.
        self._is_stalled = False

    # ------------------------------------------------------------ calls about sequences

    def submit(self, request: SequenceRequest) -> None:
        """Takes a sequence.

        A later attempt of one that is here already adopts it: nothing is computed again, and the next `step` gives all
        tokens from index `len(request.output_ids)` on under the new attempt. If what it has generated is something
        else than `output_ids`, it is dropped and the request is taken as new. An attempt that is not later is ignored.

        A request whose `output_ids` are complete already ends at once.

        Raises:
            InvalidRequest, ContextLengthExceeded, NeverFits: it can never be computed here.
            QueueFull: too many wait. Never for an attempt after the first: it goes on with work that was accepted.
        """
        known = self._find(request.uid, request.choice)
        if known is not None and request.attempt <= known.attempt:
            return
        check_request(request, self._runner.model, self._config)
        self._grammar_wait.check(request)
        if known is not None and can_adopt(known, request):
            self._adopt(known, request)
            return
        if known is not None:
            self._drop(known)
        elif request.attempt <= 1:
            self._check_queue()
        self._take(request)

    def abort(self, uid: str, attempt: int | None = None) -> int:
        """Ends the sequences of a request. Pages that a launched step uses go back when it is done.

        Args:
            uid: the request.
            attempt: only attempts up to this one; None = all.

        Returns:
            How many ended; each gives an event `aborted`.
        """
        ended = [seq for seq in self._sequences.get(uid, {}).values() if attempt is None or seq.attempt <= attempt]
        for seq in ended:
            self._drop(seq)
            self._outbox.event(seq, "aborted", completion_tokens=seq.num_output_tokens)
        return len(ended)

    def stop(self, uid: str, choice: int, attempt: int) -> bool:
        """Ends a sequence because its text has come to a stop string; whether it was there, at that attempt."""
        seq = self._find(uid, choice)
        if seq is None or seq.attempt != attempt:
            return False
        self._drop(seq)
        self._planner.answered(seq.num_output_tokens)
        self._outbox.finished(seq, FinishReason.STOP)
        return True

    def hold(self, keys: Collection[Key]) -> None:
        """Keeps these (uid, choice) out of steps until the next call; all others may run."""
        self._is_stalled = False
        before, self._held_keys = self._held_keys, frozenset(keys)
        for key in before ^ self._held_keys:
            if (seq := self._find(*key)) is not None:
                self._planner.hold(seq, self._is_held(seq))

    def progress(self, uid: str) -> list[SequenceProgress]:
        """How far the sequences of a request are; empty when it is unknown."""
        return [
            SequenceProgress(choice, seq.attempt, seq.state, seq.num_output_tokens)
            for choice, seq in sorted(self._sequences.get(uid, {}).items())
        ]

    def live(self) -> list[tuple[str, int]]:
        """The (uid, attempt) of all sequences, each once."""
        return sorted({(uid, seq.attempt) for uid, choices in self._sequences.items() for seq in choices.values()})

    # ------------------------------------------------------------ calls about the engine

    def close(self) -> None:
        """Gives back what the runner holds; nothing may be called afterwards."""
        self._grammar_wait.close()
        self._runner.close()

    def prefault_memory(self) -> bool:
        """Uses some memory for the first time while there is nothing to compute; whether more is left."""
        return self._runner.prefault_memory()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: compute, collect, or hand out what is ready."""
        return bool(self._grammar_wait) or self._can_advance

    @property
    def _can_advance(self) -> bool:
        return bool(self._outbox or self._pipeline.num_launched) or not (self._is_stalled or self._planner.is_idle)

    def step(self) -> StepOutput:
        """One turn: launches as many steps as the runner's depth allows, collects the oldest."""
        for seq, error in self._grammar_wait.take_ready(may_wait=not self._can_advance):
            self._is_stalled = False
            if error is None:
                self._planner.hold(seq, self._is_held(seq))
            else:
                self._fail(seq, error)
        while self._pipeline.has_room:
            has_launched = self._pipeline.launch()
            for seq in self._planner.outgrown:
                self._finish(seq, FinishReason.LENGTH, seq.num_output_tokens)
            if not has_launched:
                self._is_stalled = not self._planner.outgrown
                break
        if self._pipeline.num_launched:
            self._is_stalled = False
            for landed in self._pipeline.collect():
                self._take_landed(landed)
        return self._outbox.take()

    def statistics(self) -> EngineStatistics:
        """Counts of this moment."""
        pool = self._tables.pool
        return EngineStatistics(
            running=self._planner.num_running,
            waiting=self._planner.num_waiting,
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_owned=pool.num_owned,
            page_tokens=self._config.page_tokens,
            steps=self._planner.num_steps,
            prompt_tokens=self._planner.num_prompt_tokens,
            cached_prompt_tokens=self._planner.num_cached_tokens,
            output_tokens=self._num_output_tokens,
            retractions=self._planner.num_retractions,
            attention=self._runner.model.attention,
        )

    def check_integrity(self) -> None:
        """Checks that free + cached + owned pages are all, and that every reference has its holder.

        Raises:
            IntegrityError: says where the books are wrong.
        """
        self._planner.check()

    def reset_cache(self) -> int:
        """Empties the prefix cache of all that no sequence uses; returns how many pages that were."""
        self._is_stalled = False
        return self._tables.tree.reset()

    # ------------------------------------------------------------ coming and going

    def _find(self, uid: str, choice: int) -> LiveSequence | None:
        return self._sequences.get(uid, {}).get(choice)

    def _check_queue(self) -> None:
        if self._planner.num_waiting >= self._config.max_waiting + self._planner.num_free_slots:
            raise QueueFull(self._planner.num_waiting, self._config.max_waiting)

    def _take(self, request: SequenceRequest) -> None:
        self._is_stalled = False
        self._num_submitted += 1
        seq = LiveSequence(request, self._num_submitted, self._runner.model.eos_token_ids, self._max_context_tokens)
        if request.attempt > 1:
            self._outbox.take_back(seq)  # an earlier attempt may have ended at once, unheard
        self._outbox.event(seq, "queued", at_s=request.taken_at_s, prompt_tokens=seq.num_prompt_tokens)
        if (reason := seq.finish_reason()) is not None and not seq.scores_prompt:
            self._outbox.tokens(seq, seq.num_output_tokens, reason)
            self._outbox.finished(seq, reason)
            return
        self._grammar_wait.begin(seq)
        seq.held = self._is_held(seq)
        self._sequences.setdefault(request.uid, {})[request.choice] = seq
        self._planner.add(seq)

    def _is_held(self, seq: LiveSequence) -> bool:
        return seq.key in self._held_keys or seq in self._grammar_wait

    def _fail(self, seq: LiveSequence, error: BusllmError) -> None:
        """Gives a sequence up, with the reason for its client."""
        self._drop(seq)
        self._outbox.failed(seq, error)

    def _adopt(self, seq: LiveSequence, request: SequenceRequest) -> None:
        self._outbox.take_back(seq)
        seq.attempt = request.attempt
        delivered = len(request.output_ids)
        self._outbox.event(seq, "adopted", completion_tokens=delivered)
        if delivered < seq.num_output_tokens:
            self._outbox.tokens(seq, delivered)

    def _drop(self, seq: LiveSequence) -> None:
        """Lets a sequence go before its own end; what it has not said yet remains unsaid."""
        self._outbox.take_back(seq)
        self._forget(seq)

    def _forget(self, seq: LiveSequence) -> None:
        self._is_stalled = False
        seq.ended = True
        self._grammar_wait.discard(seq)
        choices = self._sequences[seq.request.uid]
        del choices[seq.request.choice]
        if not choices:
            del self._sequences[seq.request.uid]
        self._planner.remove(seq)

    def _finish(self, seq: LiveSequence, reason: FinishReason, first: int) -> None:
        """The sequence has come to its own end; `first` is the index of the tokens that are new."""
        self._forget(seq)
        self._planner.answered(seq.num_output_tokens)
        self._outbox.tokens(seq, first, reason)
        self._outbox.finished(seq, reason)

    def _take_landed(self, landed: LandedRow) -> None:
        seq, row = landed.seq, landed.row
        seq.landed(row)
        if not seq.ended:
            self._take_values(landed)
        # After the end, too: a leaving sequence gives its pages back with its last row.
        self._planner.settle(seq)

    def _take_values(self, landed: LandedRow) -> None:
        seq, row, first = landed.seq, landed.row, landed.seq.num_output_tokens
        if landed.error is not None:
            self._fail(seq, landed.error)
            return
        if landed.prompt_logprobs is not None:
            seq.score_prompt(landed.prompt_logprobs)
        if row.start < seq.prefill_end == row.start + row.num_tokens:
            self._outbox.event(seq, "prefilled", prompt_tokens=seq.num_prompt_tokens)
        if landed.sampled is not None:
            if first == seq.num_inherited_tokens:
                self._outbox.event(seq, "first_token")
            seq.take(landed.sampled)
            self._num_output_tokens += len(landed.sampled.token_ids)
        self._planner.computed(seq, row)
        if seq.num_computed >= seq.prefill_end and (reason := seq.finish_reason()) is not None:
            self._finish(seq, reason, first)
        elif landed.sampled is not None:
            self._outbox.tokens(seq, first)
