"""What the ranks behind the first receive on `plan.<scheduler>`, what they answer, and what all ranks announce.

Owns: the numbered orders of rank 0, their acknowledgement, and the `statistics` by which ranks find each other.
Does not know: when an order is sent again (`stages/scheduler/rank_leader.py`).
Next on the path: `stages/rank/`.

The subject names rank 0's instance, which is new at every start: so it is the replica's epoch, and an order of an
earlier one reaches nobody.
"""

from __future__ import annotations

import msgspec

from busllm.messages.codec import Decoder
from busllm.messages.parts import Part
from busllm.plan import StepPlan


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate", gc=False):
    """Make the KV cache, anew when there is one.

    Attributes:
        number: of the order; the first has 0.
        num_pages, page_tokens, max_running, max_context_tokens: as a runner's `allocate` takes them.
    """

    number: int
    num_pages: int
    page_tokens: int
    max_running: int
    max_context_tokens: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """Take part in a step.

    Attributes:
        number: of the order, one more than the one before.
        plan: what is computed.
    """

    number: int
    plan: StepPlan


class OrderTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken", gc=False):
    """A rank has this order and all before it; the answer to an order, also to one that came twice."""

    rank: int
    number: int


class Meeting(msgspec.Struct, frozen=True):
    """`statistics.ranks` of a scheduler that is split: where the others meet it.

    Attributes:
        size: ranks of the replica, this one included.
        host, port: of the store; None = not open yet, or nothing is computed together (the null model).
        open: whether the others may come.
        here: ranks that have come, this one included.
    """

    size: int
    host: str | None = None
    port: int | None = None
    open: bool = False
    here: int = 1


class RankStatus(msgspec.Struct, frozen=True):
    """`statistics` of a rank behind the first.

    Attributes:
        replica, rank: which.
        leader: instance of rank 0 that it has come to; None = it loads, or looks for it.
        model: fingerprint of what it has loaded, number format included; None = it loads.
        steps: in which it took part.
    """

    replica: int
    rank: int
    leader: str | None = None
    model: str | None = None
    steps: int = 0


RankOrder = Allocate | Step
ToRanks = RankOrder | Part
decoder: Decoder[ToRanks] = Decoder(ToRanks)
taken_decoder: Decoder[OrderTaken] = Decoder(OrderTaken)
