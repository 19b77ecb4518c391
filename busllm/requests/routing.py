"""Which instance gets a request.

Owns: the choice among usable peers. Pure: it looks at what the directory has heard.
Does not know: how a request is sent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from busllm.actors.directory import Peer


def pick(peers: Sequence[Peer], in_flight: dict[str, int]) -> Peer | None:
    """The least loaded peer.

    Load is what the peer announced as `requests` (half a second old at most) plus what this actor has sent it itself
    and not seen end (`in_flight`), so that a burst between two heartbeats spreads too. Equals are drawn by lot.
    """
    if not peers:
        return None

    def load(peer: Peer) -> tuple[float, float]:
        announced = peer.announcement.load.get("requests", 0.0)
        return max(announced, float(in_flight.get(peer.instance, 0))), random.random()

    return min(peers, key=load)
