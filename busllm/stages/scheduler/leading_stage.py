"""The scheduler of a replica that is split among ranks.

Owns: what rank 0 does beyond any scheduler: gathering the others, and ending when one of them is gone or a step hangs.
Does not know: how orders travel (`rank_leader.py`).
Next on the path: `stage.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from busllm.actors.actor import Actor
from busllm.actors.directory import PeerChange
from busllm.bus.protocol import BusEvent, Reconnected
from busllm.engine.engine import Engine
from busllm.stages.scheduler.rank_leader import RankLeader
from busllm.stages.scheduler.stage import SchedulerStage


class LeadingSchedulerStage(SchedulerStage):
    """Behaviour of rank 0 when there are others.

    Args:
        make_engine: loads this rank's part and gathers the others; called in the engine's thread.
        leader: through which it does that.
    """

    def __init__(self, make_engine: Callable[[], Engine], leader: RankLeader) -> None:
        super().__init__(make_engine)
        self._leader = leader

    async def start(self, actor: Actor) -> None:
        """See `Behaviour`."""
        self._leader.attach(actor)
        actor.tasks.start_soon(self._leader.run)
        await super().start(actor)

    def statistics(self) -> dict[str, Any]:
        """See `Behaviour`."""
        return {**super().statistics(), "ranks": msgspec.to_builtins(self._leader.meeting)}

    def bus_event(self, event: BusEvent) -> None:
        """See `Behaviour`."""
        super().bus_event(event)
        if isinstance(event, Reconnected):
            self._leader.send_again()

    def peer_changed(self, change: PeerChange) -> None:
        """See `Behaviour`."""
        self._leader.peer_changed(change)
        super().peer_changed(change)

    def stalled_for_s(self) -> float | None:
        """See `SchedulerStage`. Waiting for the bus is no stall: who is gone is told by the directory."""
        if self._leader.is_waiting:
            return None
        hangs_for_s = self._leader.hangs_for_s()
        if hangs_for_s is not None:
            return hangs_for_s
        since_delivery_s = time.monotonic() - self._leader.delivered_at_s
        computes_too_long = since_delivery_s > self._actor.settings.timings.stall_base_s
        return super().stalled_for_s() if computes_too_long else None
