"""The files by which a running cluster is found on its host, and by which a second `busllm up` is refused.

Owns: `$XDG_STATE_HOME/busllm/<cluster>@<host>.json` (what runs, for client commands) and `.lock` beside it (whether it
runs: the kernel drops the lock with the process, however that ends).
Does not know: what is done with a cluster that was found.
Next on the path: client commands connect to `RunningCluster.bus`.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from busllm.errors import AlreadyRunning, ConfigError
from busllm.topology.nearest import nearest

MEMORY = "memory"
_LOOKERS_S = 0.1  # a client command that looks whether the cluster runs holds the lock for an instant


class RunningCluster(msgspec.Struct, frozen=True):
    """What the state file tells.

    Attributes:
        cluster: its name.
        bus: URL with its secret, or "memory".
        http: URLs of the frontends on this host.
        pid: of `busllm up`.
        topology: the topology file as `up` read it; None = the built-in one.
    """

    cluster: str
    bus: str
    http: tuple[str, ...] = ()
    pid: int | None = None
    topology: str | None = None


def state_directory() -> Path:
    """`$XDG_STATE_HOME/busllm`, by default `~/.local/state/busllm`."""
    state_home = os.environ.get("XDG_STATE_HOME")
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "busllm"


class StateFiles:
    """The files of one cluster on one host.

    Attributes:
        state: the state file.
        topology: a copy of the topology file.
        bus_server: folder for the files of the bus server that `up` starts; its log stays there.

    Args:
        cluster: its name.
        host: name of the host.
        directory: where; None = `state_directory()`.
    """

    def __init__(self, cluster: str, host: str, directory: Path | None = None) -> None:
        self._cluster = cluster
        self._directory = directory or state_directory()
        stem = f"{cluster}@{host}"
        self._lock = self._directory / f"{stem}.lock"
        self.state = self._directory / f"{stem}.json"
        self.topology = self._directory / f"{stem}.toml"
        self.bus_server = self._directory / f"{stem}.bus"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock; removes the other files at the end.

        Raises:
            AlreadyRunning: another process holds it.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the state directory {str(self._directory)!r} cannot be used: {error.strerror}.", key="XDG_STATE_HOME"
            ) from error
        try:
            self._take(lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            try:
                yield
            finally:
                self.state.unlink(missing_ok=True)
                self.topology.unlink(missing_ok=True)
        finally:
            os.close(lock)  # the lock file stays: to remove it would let two processes lock two files of that name

    def _take(self, lock: int) -> None:
        give_up_at_s = time.monotonic() + _LOOKERS_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > give_up_at_s:
                    raise AlreadyRunning(self._cluster, int(os.pread(lock, 32, 0) or b"0")) from error
            time.sleep(_LOOKERS_S / 10)

    def write_state(self, running: RunningCluster) -> None:
        """Writes what runs, readable by this user alone."""
        _replace(self.state, msgspec.json.encode(running))

    def keep_topology(self, text: str) -> Path:
        """Keeps a copy of the topology file, so that all processes, restarted ones too, read what `up` has checked."""
        _replace(self.topology, text.encode())
        return self.topology


def find_cluster(cluster: str | None = None, directory: Path | None = None) -> RunningCluster:
    """Finds a cluster that runs on this host.

    Args:
        cluster: its name; None = the only one.
        directory: of the state files; None = `state_directory()`.

    Raises:
        ConfigError: none runs, or several do and none was named.
    """
    running = {found.cluster: found for found in running_clusters(directory)}
    if cluster is not None:
        if cluster not in running:
            raise ConfigError(
                f"no cluster {cluster!r} runs on this host; start it with `busllm up` or name a bus with --bus URL.",
                suggestion=nearest(cluster, running),
            )
        return running[cluster]
    if not running:
        raise ConfigError("no cluster runs on this host; start one with `busllm up` or name a bus with --bus URL.")
    if len(running) > 1:
        raise ConfigError(f"several clusters run on this host: {', '.join(sorted(running))}; choose with --cluster.")
    return next(iter(running.values()))


def running_clusters(directory: Path | None = None) -> Iterator[RunningCluster]:
    """Yields the clusters of this host whose `busllm up` lives; files that a killed one left are passed over."""
    for path in sorted((directory or state_directory()).glob("*.json")):
        if not _is_locked(path.with_suffix(".lock")):
            continue
        try:
            yield msgspec.json.decode(path.read_bytes(), type=RunningCluster)
        except FileNotFoundError:
            continue  # it ended just now
        except msgspec.DecodeError as error:
            raise ConfigError(f"is not a state file: {error}.", file=str(path)) from error


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _replace(path: Path, content: bytes) -> None:
    """Writes a file with mode 0600 in one step, so that no reader sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes it 0600
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(name).replace(path)
