"""What a comparison leaves behind: everything that the page and the table are made of.

Owns: the stored form and its file.
Does not know: medians (`summary.py`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from busllm.cli.load.report import Report


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured.

    Attributes:
        cpu, flags: as the kernel names them; of the flags those that matter for arithmetic.
        num_cores: that this process may use.
        memory_bytes: in all.
        versions: of the software on our side, by name.
        commit: of this checkout, with "+" behind it when files had been changed; None = not known.
    """

    cpu: str
    flags: tuple[str, ...]
    num_cores: int
    memory_bytes: int
    kernel: str
    versions: dict[str, str]
    commit: str | None


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One of the compared servers.

    Attributes:
        name: short, unique.
        version: of its software.
        weights: which format it computes with.
        kv_tokens: capacity of its KV cache.
        max_sequence_tokens: the most of it that one prompt and its answer can have.
        settings: how it was started, for people.
        is_ours: whether it is busllm.
    """

    name: str
    version: str
    weights: str
    kv_tokens: int
    max_sequence_tokens: int
    settings: str
    is_ours: bool


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row on one server in one round.

    Attributes:
        figures: by the name of the figure; those that could not be read off are left out.
        error: what went wrong; None when nothing did.
        left_out: why the row was not tried; None when it was.
        report: all that the load generator said; None when the row has none.
        other_busy: cores that neither the server nor the load generator (or the program in its place) kept busy, on
            average; None when the row sends nothing. Much more than 0: somebody else was at work, and the times are
            worth little.
    """

    figures: dict[str, float] = {}
    error: str | None = None
    left_out: str | None = None
    report: Report | None = None
    other_busy: float | None = None


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """One server in one round: started, measured, stopped.

    Attributes:
        server: its name.
        round_number: from 1.
        seed: the first of the round's; every row has its own.
        load_before: processes that wanted a core, on average over the minute before.
        rows: by key.
        error: why it did not start; None when it did.
    """

    server: str
    round_number: int
    seed: int
    load_before: float
    rows: dict[str, RowResult] = {}
    error: str | None = None


class RowFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A row as it was measured."""

    key: str
    title: str


class Comparison(msgspec.Struct, kw_only=True):
    """All of it.

    Attributes:
        began_at: UTC, RFC 3339.
        model: what was served.
        visits: in the order of time.
    """

    began_at: str
    model: str
    machine: Machine
    servers: list[ServerFacts]
    rows: list[RowFacts]
    visits: list[Visit] = []

    @property
    def errors(self) -> list[str]:
        """Everything that went wrong."""
        found = []
        for visit in self.visits:
            where = f"{visit.server}, round {visit.round_number}"
            if visit.error is not None:
                found.append(f"{where}: {visit.error}")
            found += [f"{where}, {key}: {row.error}" for key, row in visit.rows.items() if row.error is not None]
        return found


def save(comparison: Comparison, path: Path) -> None:
    """Replaces a file in one step, so that an interrupted run leaves what it had."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")
    unfinished.replace(path)


def load(path: Path) -> Comparison:
    """Reads a file that `save` wrote.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(path.read_bytes(), type=Comparison)
