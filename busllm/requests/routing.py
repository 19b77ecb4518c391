"""Which instance gets a request.

Owns: the choice among usable peers. Pure: it looks at what the directory has heard.
Does not know: how a request is sent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from busllm.actors.directory import Peer


def pick(peers: Sequence[Peer], in_flight: Mapping[str, float]) -> Peer | None:
    """The least loaded peer.

    Load is what the peer announced (half a second old at most) or what this actor knows better (`in_flight`: what it
    has there itself, or has sent since), whichever is more, so that a burst between two heartbeats spreads too.
    Equals are drawn by lot.
    """
    if not peers:
        return None

    def load(peer: Peer) -> tuple[float, float]:
        return max(peer.load, in_flight.get(peer.instance, 0)), random.random()

    return min(peers, key=load)
