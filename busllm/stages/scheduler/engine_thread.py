"""The engine's own thread: import, load and every step happen there; the event loop does bus and heartbeats only.

Owns: one deque each way, and one wake-up per step (a byte on a socket pair, so that no event loop is named here).
Does not know: the bus, messages, owners.
Next on the path: `engine/engine.py`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import msgspec

from busllm.engine.engine import Engine
from busllm.engine.sequence import EngineStatistics, SequenceRequest, StepOutput
from busllm.errors import BusllmError, EngineError
from busllm.precedence import stop_giving_way

Command = Callable[[Engine], None]


class Refused(msgspec.Struct, frozen=True):
    """The engine does not take a sequence, or gives it up."""

    request: SequenceRequest
    error: BusllmError


class Crashed(msgspec.Struct, frozen=True):
    """The engine failed; its process must end."""

    error: BaseException


EngineOutput = StepOutput | Refused | Crashed


class EngineThread:
    """Runs one engine. All methods but the thread's own are called from the event loop."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._commands: deque[Command] = deque()
        self._outputs: deque[EngineOutput] = deque()
        self._has_command = threading.Condition()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._signalled = False
        self._closing = False
        self._paused = False
        self._needs_memory = True  # until the engine says otherwise
        self._ended = False
        self._at_end: list[Callable[[], None]] = []  # wakes those who wait for an answer
        self._step_began_at: float | None = None
        self._slowest_step_s = 0.0
        self._statistics: EngineStatistics | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Starts the thread and waits until the engine is loaded.

        Raises:
            Exception: what loading raised.
        """
        self._thread.start()
        while self._statistics is None:
            for output in await self.receive():
                if isinstance(output, Crashed):
                    raise output.error

    # ------------------------------------------------------------ event loop's side

    def submit(self, request: SequenceRequest) -> None:
        """Starts or adopts a sequence; a refusal comes back as `Refused`."""
        taken = msgspec.structs.replace(request, taken_at_s=time.monotonic())

        def command(engine: Engine) -> None:
            try:
                engine.submit(taken)
            except BusllmError as error:
                self._put(Refused(request, error))

        self._send(command)

    def abort(self, uid: str, attempt: int | None) -> None:
        """Ends attempts of a request."""
        self._send(lambda engine: _ignore(engine.abort(uid, attempt)))

    def stop(self, uid: str, choice: int, attempt: int) -> None:
        """A stop string ended a sequence."""
        self._send(lambda engine: _ignore(engine.stop(uid, choice, attempt)))

    def hold(self, keys: Collection[tuple[str, int]]) -> None:
        """These (uid, choice) stay out of steps until the next call."""
        kept = frozenset(keys)
        self._send(lambda engine: engine.hold(kept))

    def pause(self, paused: bool) -> None:
        """Stops or resumes stepping (the bus is away: output would be lost)."""

        def command(_: Engine) -> None:
            self._paused = paused

        self._send(command)

    async def reset_cache(self) -> int:
        """Empties the prefix cache; returns the number of pages freed.

        Raises:
            EngineError: the thread ends, or has ended, without doing it.
        """
        done, freed = anyio.Event(), []
        token = anyio.lowlevel.current_token()

        def wake() -> None:
            anyio.from_thread.run_sync(done.set, token=token)

        def command(engine: Engine) -> None:
            freed.append(engine.reset_cache())
            wake()

        # In this order: an end that comes before the question is seen here, one that comes after it wakes.
        self._at_end.append(wake)
        try:
            if not self._ended:
                self._send(command)
                await done.wait()
        finally:
            self._at_end.remove(wake)
        if not freed:
            raise EngineError("The engine has ended; its cache went with it.")
        return freed[0]

    async def receive(self) -> list[EngineOutput]:
        """Waits for output and returns all there is."""
        while not self._outputs:
            await anyio.wait_readable(self._reader)
            # In this order: what is put after the flag is down sends a byte, what was put before is seen by the loop.
            self._drain_signal()
            self._signalled = False
        outputs = []
        while self._outputs:
            outputs.append(self._outputs.popleft())
        return outputs

    def _drain_signal(self) -> None:
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            return

    @property
    def statistics(self) -> EngineStatistics | None:
        """Counts after the latest step; None while loading."""
        return self._statistics

    def stalled_for_s(self, base_s: float, factor: float) -> float | None:
        """How long the running step has lasted, when that is over `base_s + factor * slowest step so far`."""
        began = self._step_began_at
        if began is None:
            return None
        lasted = time.monotonic() - began
        return lasted if lasted > base_s + factor * self._slowest_step_s else None

    async def close(self) -> None:
        """Ends the thread after its current step."""
        self._closing = True
        with self._has_command:
            self._has_command.notify()
        await anyio.to_thread.run_sync(self._thread.join, 10.0)
        self._reader.close()
        self._writer.close()

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        with self._has_command:
            self._has_command.notify()

    # ------------------------------------------------------------ the thread's side

    def _put(self, output: EngineOutput) -> None:
        self._outputs.append(output)
        if not self._signalled:
            self._signalled = True
            self._writer.send(b"\0")

    def _run(self) -> None:
        stop_giving_way()
        try:
            engine = self._make_engine()
            self._statistics = engine.statistics()
            self._put(StepOutput((), ()))
            while not self._closing:
                self._turn(engine)
            engine.close()
        except BaseException as error:  # noqa: BLE001 - the seam: whatever it is, the event loop decides what follows
            self._put(Crashed(error if isinstance(error, BusllmError) else _as_engine_error(error)))
        finally:
            self._ended = True
            for wake in tuple(self._at_end):
                wake()

    def _turn(self, engine: Engine) -> None:
        while self._commands:
            self._commands.popleft()(engine)
        if self._paused or not engine.has_work:
            self._statistics = engine.statistics()
            self._rest(engine)
            return
        began = self._step_began_at = time.monotonic()
        output = engine.step()
        self._slowest_step_s = max(self._slowest_step_s, time.monotonic() - began)
        self._step_began_at = None
        self._statistics = engine.statistics()
        self._put(output)
        for failure in output.failures:
            self._put(Refused(failure.request, failure.error))

    def _rest(self, engine: Engine) -> None:
        """Waits for a command. Meanwhile memory is made ready, which takes milliseconds at a time."""
        while self._needs_memory and not self._commands and not self._closing:
            self._needs_memory = engine.prefault_memory()
        with self._has_command:
            if not self._commands and not self._closing:
                self._has_command.wait()


def _ignore(_: object) -> None:
    """The count that the engine returns is not needed here: its events tell the same."""


def _as_engine_error(error: BaseException) -> EngineError:
    made = EngineError(f"The engine failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
