"""What all actors of a process have in common.

Owns: `ActorSettings`.
"""

from __future__ import annotations

import msgspec

from busllm.actors.clock import Timings
from busllm.messages.control import Versions
from busllm.telemetry.trace import TraceLevel


class ActorSettings(msgspec.Struct, frozen=True):
    """Settings of a process's actors.

    Attributes:
        cluster: second token of every subject.
        host: name of this host.
        versions: what must agree with others.
        timings: all durations.
        trace_level: how much is told.
    """

    cluster: str
    host: str
    versions: Versions = Versions()
    timings: Timings = Timings()
    trace_level: TraceLevel = TraceLevel.REQUESTS
