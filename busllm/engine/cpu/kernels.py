"""Compiled kernels: made once per CPU and version, kept in the cache, loaded in a fraction of a second.

Owns: where numba keeps them and which threads it uses, both decided before the kernels are imported.
Does not know: what they compute.
Next on the path: `cpu_decoder.py`, which may be imported once `prepare_kernels` was called.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import llvmlite
import numba
import torch

from busllm.engine.cpu.instructions import detect_instructions
from busllm.errors import EngineError
from busllm.model_store.files import cache_root

_KEPT_VERSIONS = 4
_UNUSED_S = 24 * 3600.0


def prepare_kernels(cache_dir: Path | None = None) -> Path:
    """Tells numba where to keep what it compiles.

    A kernel is looked up by the file it stands in, so a change in another file that it uses would go unnoticed. So the
    folder's name holds a digest of all of them, of the compiler's version and of the CPU.

    Args:
        cache_dir: instead of the usual cache folder.

    Returns:
        The folder; a temporary one where the cache cannot be written.

    Raises:
        EngineError: the kernels cannot run on this CPU.
    """
    instructions = detect_instructions()
    if instructions is None:
        raise EngineError("this CPU has no instructions that the compiled forward pass is written for")
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {instructions}".encode())
    folder = Path(__file__).parent
    for source in (*sorted(folder.glob("*.py")), *sorted(folder.parent.glob("compiled_*.py"))):
        digest.update(source.read_bytes())
    folder = cache_root(cache_dir) / "kernels" / f"{instructions.cpu}-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="busllm-kernels-"))
    with suppress(OSError):  # the cache may belong to somebody else, and another process may tidy up as well
        os.utime(folder)  # says that it is in use
        remove_unused(folder)
    numba.config.CACHE_DIR = str(folder)
    # numba's own threads ("workqueue") abort the process when two threads of it compute at the same time.
    numba.config.THREADING_LAYER = "omp"
    # numba begins with telling OpenMP to use every core, and torch would listen.
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)
    return folder


def are_compiled(folder: Path) -> bool:
    """Whether kernels have been compiled into a folder; the first use of an empty one takes a while."""
    return any(folder.rglob("*.nbi"))  # numba's indexes


def remove_unused(folder: Path) -> None:
    """Removes kernels of other versions for the same CPU, but for the last ones used and those used today.

    Args:
        folder: in use.
    """
    cpu = folder.name.rpartition("-")[0]
    others = (other for other in folder.parent.glob(f"{cpu}-*") if other.name.rpartition("-")[0] == cpu)
    used = {other: other.stat().st_mtime for other in others}
    for other in sorted(used, key=lambda each: used[each], reverse=True)[_KEPT_VERSIONS:]:
        if time.time() - used[other] > _UNUSED_S:
            # Under another name first: whoever looks for it finds all of it or nothing.
            gone = other.rename(other.with_name(f".{other.name}.gone-{os.getpid()}"))
            shutil.rmtree(gone, ignore_errors=True)
