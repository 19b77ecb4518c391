"""A server that comes as a Python package, in a virtual environment of its own.

Owns: what is the same for all of these: their environment, whether they are installed, most of their facts.
Does not know: how one is installed and started (`llama.py`, `vllm.py`).
"""

from __future__ import annotations

from pathlib import Path

from bench.compare.models import PeerModel
from bench.compare.peers.environment import VirtualEnvironment
from bench.compare.results import ServerFacts
from busllm.cli.load.workload import Workload


class PackagedPeer:
    """The part of a `Peer` that does not depend on which server it is.

    Args:
        folder: of all peers.
        kv_tokens: capacity of its KV cache.
    """

    name: str
    package: str
    served_model = "smol"

    def __init__(self, folder: Path, model: PeerModel, kv_tokens: int) -> None:
        self._environment = VirtualEnvironment(folder / self.name)
        self._model = model
        self._kv_tokens = kv_tokens

    @property
    def is_installed(self) -> bool:
        return self._environment.distribution(self.package) is not None

    def offline_command(self, workload: Workload, concurrency: int) -> None:
        """Only ours is held against itself."""

    def _facts(self, *, weights: str, max_sequence_tokens: int, settings: str) -> ServerFacts:
        found = self._environment.distribution(self.package)
        return ServerFacts(
            name=self.name,
            version=f"{self.package} {found.version if found is not None else 'not installed'}",
            weights=weights,
            kv_tokens=self._kv_tokens,
            max_sequence_tokens=max_sequence_tokens,
            settings=settings,
            is_ours=False,
        )
