"""llama.cpp, from the wheel `xllamacpp`, which holds its HTTP server as a library.

Owns: its installation and its command line.
Does not know: its settings (`serve_llama.py`, which runs in its environment).
"""

from __future__ import annotations

from pathlib import Path

from bench.compare.machine import num_cores
from bench.compare.peers.packaged import PackagedPeer
from bench.compare.results import ServerFacts
from bench.compare.server import Launch

_NUM_SLOTS = 32
_SCRIPT = Path(__file__).with_name("serve_llama.py")


class LlamaPeer(PackagedPeer):
    """llama.cpp with 4-bit weights in Q4_0, which it computes faster than Q4_1."""

    name = "llama"
    package = "xllamacpp"

    def install(self) -> None:
        self._environment.make()
        self._environment.pip_install(self.package)

    def facts(self) -> ServerFacts:
        return self._facts(
            weights="Q4_0, embedding and head as in the model's file",
            max_sequence_tokens=self._kv_tokens // _NUM_SLOTS,
            settings=f"{_NUM_SLOTS} slots, {num_cores()} threads",
        )

    def launch(self, port: int) -> Launch:
        arguments = (self._model.q4_0_file(), port, self._kv_tokens, _NUM_SLOTS, num_cores())
        command = (str(self._environment.python), str(_SCRIPT), *map(str, arguments))
        return Launch(command=command, ready_path="/health")
