"""Which servers there are.

Owns: their list by name.
Does not know: how any is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.compare.models import PeerModel
from bench.compare.peers.llama import LlamaPeer
from bench.compare.peers.peer import Peer
from bench.compare.peers.vllm import VllmPeer

FOLDER_VARIABLE = "PEERS"

OTHERS: Mapping[str, Callable[[Path, PeerModel, int], Peer]] = MappingProxyType({"llama": LlamaPeer, "vllm": VllmPeer})


def peers_folder() -> Path:
    """Where other servers are installed: `$PEERS`, else `$XDG_CACHE_HOME/busllm-peers` (`~/.cache/busllm-peers`)."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "busllm-peers"


def other(name: str, model: PeerModel, kv_tokens: int) -> Peer:
    """Another server by its name.

    Args:
        kv_tokens: capacity of its KV cache.

    Raises:
        KeyError: there is none.
    """
    return OTHERS[name](peers_folder(), model, kv_tokens)
