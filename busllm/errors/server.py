"""Configuration, processes, models and the engine: what stops a server from starting or going on."""

from __future__ import annotations

from busllm.errors.root import BusllmError


class ConfigError(BusllmError):
    """A topology file or flag is wrong.

    Attributes:
        file: the file, or None for the built-in topology.
        key: full dotted key.
        line: 1-based line where it can be found.
        suggestion: the nearest right key or value.
    """

    code = "bad_config"

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        line: int | None = None,
        suggestion: str | None = None,
    ) -> None:
        super().__init__(message, param=key)
        self.file = file
        self.key = key
        self.line = line
        self.suggestion = suggestion

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        places = [place for place in (f"{self.file}{line}" if self.file else "", self.key or "") if place]
        hint = f" Did you mean {self.suggestion!r}?" if self.suggestion else ""
        return ": ".join([*places, self.message]) + hint


class MissingPackage(BusllmError):
    """A plug-in or an optional dependency that the topology names is not installed."""

    code = "missing_package"


class AlreadyRunning(BusllmError):
    """Another `busllm up` of the same cluster runs on this host."""

    code = "already_running"

    def __init__(self, cluster: str, pid: int) -> None:
        super().__init__(f"cluster {cluster!r} already runs on this host with pid {pid}; stop it first.")
        self.cluster = cluster
        self.pid = pid


class AddressUnavailable(BusllmError):
    """`frontend.listen` cannot be bound: taken, or not an address of this host."""

    code = "address_unavailable"

    def __init__(self, address: str, reason: str) -> None:
        advice = "Stop what uses it, or change frontend.listen in a file for --topology."
        super().__init__(f"cannot listen on {address}: {reason}. {advice}")
        self.address = address
        self.reason = reason


class Superseded(BusllmError):
    """A live older instance of the same kind and index is on the bus; this one ends with exit status 3."""

    code = "superseded"


class ModelError(BusllmError):
    """A model cannot be fetched, read or served; the message gives the reason."""

    code = "model_error"


class FetchFailed(ModelError):
    """A model could not be fetched: no network, no such repository, a package index that does not answer."""

    code = "fetch_failed"


class ChecksumMismatch(ModelError):
    """A fetched file is not the one that was published."""

    code = "checksum_mismatch"


class EngineError(BusllmError):
    """The engine broke an invariant of its own; its process ends."""

    code = "engine_error"


class IntegrityError(EngineError):
    """The page accounting does not add up; the message says where."""

    code = "engine_integrity"
