"""What an engine's thread is doing while it loads, for the announcements of its stage.

Owns: the way of a word from that thread to the actor's event loop.
Does not know: what is loaded, how it is announced (`actors/presence.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import anyio.from_thread
import anyio.lowlevel

from busllm.actors.actor import Actor


class LoadProgress:
    """Called with a few words by the thread that loads; silent until a stage has been attached."""

    def __init__(self) -> None:
        self._report: Callable[[str], None] | None = None

    def attach(self, actor: Actor) -> None:
        """From now on the actor announces what is told. Called on its event loop."""
        token = anyio.lowlevel.current_token()

        def report(text: str) -> None:
            anyio.from_thread.run_sync(actor.report_progress, text, token=token)

        self._report = report

    def __call__(self, text: str) -> None:
        """Tells it; from the other thread."""
        if self._report is not None:
            self._report(text)
