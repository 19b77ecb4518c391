"""llama.cpp, from the wheel `xllamacpp`, which holds its HTTP server as a library.

Owns: its installation and its command line.
Does not know: its settings (`serve_llama.py`, which runs in its environment).
"""

from __future__ import annotations

from pathlib import Path

from bench.compare.machine import num_cores
from bench.compare.models import PeerModel
from bench.compare.peers.environment import VirtualEnvironment
from bench.compare.results import ServerFacts
from bench.compare.server import Launch
from busllm.cli.load.workload import Workload

_PACKAGE = "xllamacpp"
_NUM_SLOTS = 32
_SCRIPT = Path(__file__).with_name("serve_llama.py")


class LlamaPeer:
    """llama.cpp with 4-bit weights in Q4_0, which it computes faster than Q4_1.

    Args:
        folder: of all peers.
        kv_tokens: capacity of its KV cache.
    """

    name = "llama"
    served_model = "smol"

    def __init__(self, folder: Path, model: PeerModel, kv_tokens: int) -> None:
        self._environment = VirtualEnvironment(folder / self.name)
        self._model = model
        self._kv_tokens = kv_tokens

    @property
    def is_installed(self) -> bool:
        return self._environment.distribution(_PACKAGE) is not None

    def install(self) -> None:
        self._environment.make()
        self._environment.pip_install(_PACKAGE)

    def facts(self) -> ServerFacts:
        found = self._environment.distribution(_PACKAGE)
        return ServerFacts(
            name=self.name,
            version=f"{_PACKAGE} {found.version if found is not None else 'not installed'}",
            weights="Q4_0, embedding and head as in the model's file",
            kv_tokens=self._kv_tokens,
            max_sequence_tokens=self._kv_tokens // _NUM_SLOTS,
            settings=f"{_NUM_SLOTS} slots, {num_cores()} threads",
            is_ours=False,
        )

    def launch(self, port: int) -> Launch:
        arguments = (self._model.q4_0_file(), port, self._kv_tokens, _NUM_SLOTS, num_cores())
        command = (str(self._environment.python), str(_SCRIPT), *map(str, arguments))
        return Launch(command=command, ready_path="/health")

    def offline_command(self, workload: Workload, concurrency: int) -> None:
        """Only ours is held against itself."""
