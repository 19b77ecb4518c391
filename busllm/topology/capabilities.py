"""What this version can run of what a topology file may say.

Owns: the refusal of more than one tensor-parallel rank, until there is a stage for the others.
Does not know: anything else; when the rank stage exists this file and its two callers' lines go.
"""

from __future__ import annotations

from busllm.errors import ConfigError
from busllm.topology.config import Topology


def refuse_what_cannot_run(topology: Topology, file: str | None) -> None:
    """Checks that this version can run the topology.

    Raises:
        ConfigError: it cannot.
    """
    if topology.scheduler.tensor_parallel > 1:
        raise ConfigError(
            f"is {topology.scheduler.tensor_parallel}; 1 is what this version runs. Use scheduler.count for replicas.",
            file=file,
            key="scheduler.tensor_parallel",
        )
