"""Sequences whose grammar is being compiled, in a thread of its own: a step that has other work waits for none.

Owns: which sequences wait, and the thread. What it compiles stays with the sequence, so the runner finds it as often as
the sequence takes a slot.
Does not know: the queue (the engine holds such a sequence there), what a grammar is.
Next on the path: `busllm/grammar/compiler.py`; the runner finds the compiled grammar there.
"""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor

from busllm.engine.cores import unbind_thread
from busllm.engine.live_sequence import LiveSequence
from busllm.engine.sequence import SequenceRequest
from busllm.errors import BusllmError, InvalidRequest
from busllm.grammar.compiler import CompiledGrammar, GrammarCompiler

LOOK_S = 0.002
"""How long a turn without other work waits before it gives its caller a chance to bring some."""


class GrammarWait:
    """Waiting sequences.

    Args:
        compiler: of the model; None = it takes no grammars.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[LiveSequence, Future[CompiledGrammar]] = {}
        # Whose compilation is over, as the thread tells: a step looks at these alone, however many wait.
        self._done: queue.SimpleQueue[LiveSequence] = queue.SimpleQueue()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: LiveSequence) -> bool:
        return seq in self._waiting

    def check(self, request: SequenceRequest) -> None:
        """Refuses a grammar where there is no compiler.

        Raises:
            InvalidRequest: names the field.
        """
        grammar = request.params.grammar
        if grammar is not None and self._compiler is None:
            raise InvalidRequest(f"{grammar.param} is not supported by this model.", param=grammar.param)

    def begin(self, seq: LiveSequence) -> None:
        """Begins to compile the grammar of a sequence, unless it is there; one without a grammar does not wait."""
        grammar = seq.request.params.grammar
        if grammar is None or self._compiler is None:
            return
        seq.grammar = self._compiler.found(grammar)
        if seq.grammar is not None:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar", initializer=unbind_thread)
        future = self._waiting[seq] = self._thread.submit(self._compiler.compiled, grammar)
        future.add_done_callback(lambda _: self._done.put(seq))

    def take_ready(self, *, may_wait: bool = False) -> list[tuple[LiveSequence, BusllmError | None]]:
        """Sequences that wait no longer, each with the error of its grammar, if it has one.

        Args:
            may_wait: there is nothing else to do: without a grammar that is ready, wait a moment for one.
        """
        ready = []
        may_wait = may_wait and bool(self._waiting)
        while may_wait or not self._done.empty():
            try:
                seq = self._done.get(timeout=LOOK_S) if may_wait else self._done.get_nowait()
            except queue.Empty:
                break
            may_wait = False
            future = self._waiting.pop(seq, None)  # None: it has ended meanwhile
            if future is not None:
                ready.append((seq, _keep(seq, future)))
        return ready

    def discard(self, seq: LiveSequence) -> None:
        """The sequence has ended."""
        future = self._waiting.pop(seq, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _keep(seq: LiveSequence, future: Future[CompiledGrammar]) -> BusllmError | None:
    """Gives the sequence its grammar; else why there is none."""
    try:
        seq.grammar = future.result()
    except BusllmError as error:
        return error
    return None
