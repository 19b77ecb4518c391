"""busllm, from this checkout.

Owns: its topology file: the default one but for the model, the port and the weight format; its engine alone.
Does not know: what is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from bench.compare.offline import Offline
from bench.compare.results import ServerFacts
from bench.compare.server import Launch
from busllm.cli.load.workload import Workload
from busllm.model_store.files import NULL_SOURCE
from busllm.topology.config import DEFAULT_KV_TOKENS

QUANTIZATIONS = ("auto", "none", "int8", "int4")
_WEIGHTS = {
    "auto": "as in the model's file",
    "none": "bfloat16",
    "int8": "int8",
    "int4": "int4",
}
_COMMAND = (sys.executable, "-m", "busllm.cli.main")


class OurConfig(msgspec.Struct, frozen=True):
    """busllm in one configuration.

    Attributes:
        source: of the model.
        quantization: of its weights.
        kv_tokens: capacity of its KV cache.
        null_step_s: how long a step of the null model takes; of no other model.
    """

    source: str
    quantization: str = "auto"
    kv_tokens: int = DEFAULT_KV_TOKENS
    null_step_s: float = 0.001


class OurPeer:
    """busllm in one weight format.

    Args:
        folder: for its topology file and its state files; apart from those of a server that runs already.
    """

    served_model = "ours"

    def __init__(self, config: OurConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder

    @property
    def name(self) -> str:
        return f"busllm-{self._config.quantization}"

    @property
    def is_installed(self) -> bool:
        return True

    def install(self) -> None:
        if self._config.source != NULL_SOURCE:
            subprocess.run([*_COMMAND, "pull", self._config.source], check=True)

    def facts(self) -> ServerFacts:
        return ServerFacts(
            name=self.name,
            version=f"busllm {version('busllm')}",
            weights=_WEIGHTS[self._config.quantization],
            kv_tokens=self._config.kv_tokens,
            max_sequence_tokens=self._config.kv_tokens,
            settings="the built-in topology",
            is_ours=True,
        )

    def launch(self, port: int) -> Launch:
        self._folder.mkdir(parents=True, exist_ok=True)
        topology = self._folder / f"{self.name}.toml"
        topology.write_text(self._topology(port))
        return Launch(
            command=(*_COMMAND, "up", "--topology", str(topology)),
            ready_path="/ready",
            environment={"XDG_STATE_HOME": str(self._folder / "state")},
        )

    def offline_command(self, workload: Workload, concurrency: int) -> tuple[str, ...]:
        config = self._config
        order = Offline(
            source=config.source,
            quantization=config.quantization,
            kv_tokens=config.kv_tokens,
            workload=workload,
            max_running=concurrency,
        )
        return order.command()

    def _topology(self, port: int) -> str:
        config = self._config
        lines = [
            'cluster = "comparison"',
            "[model]",
            f"source = {json.dumps(config.source)}",
            f"name = {json.dumps(self.served_model)}",
        ]
        if config.source == NULL_SOURCE:
            lines.append(f"null = {{ step_time_s = {config.null_step_s} }}")
        elif config.quantization != "auto":
            lines.append(f"quantization = {json.dumps(config.quantization)}")
        lines += ["[frontend]", f'listen = "127.0.0.1:{port}"']
        if config.kv_tokens != DEFAULT_KV_TOKENS:
            lines += ["[scheduler]", f"kv_tokens = {config.kv_tokens}"]
        return "\n".join(lines) + "\n"
