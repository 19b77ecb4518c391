"""What a comparison needs to know of a server.

Owns: `Peer`.
Does not know: any server.
"""

from __future__ import annotations

from typing import Protocol

from bench.compare.results import ServerFacts
from bench.compare.server import Launch
from busllm.cli.load.workload import Workload


class Peer(Protocol):
    """One server in one configuration."""

    @property
    def name(self) -> str:
        """Short, unique."""
        ...

    @property
    def is_installed(self) -> bool:
        """Whether it can be started here."""
        ...

    @property
    def served_model(self) -> str:
        """The name by which requests ask for the model."""
        ...

    def install(self) -> None:
        """Installs it; what is there already is kept.

        Raises:
            subprocess.CalledProcessError: pip failed.
        """
        ...

    def facts(self) -> ServerFacts:
        """What is kept about it; it is installed."""
        ...

    def launch(self, port: int) -> Launch:
        """How it is started, its model's files made when they are not there.

        Raises:
            ModelError: there is no form of the model that it can read.
        """
        ...

    def offline_command(self, workload: Workload, concurrency: int) -> tuple[str, ...] | None:
        """A program that computes these requests without a server and writes a `RowResult` as JSON; None = has none."""
        ...
