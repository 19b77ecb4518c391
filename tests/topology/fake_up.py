"""`busllm up` with fake children and short durations.

python fake_up.py TOPOLOGY [NAME=BEHAVIOUR ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from busllm.cli.main import exit_status
from busllm.errors import BusllmError
from busllm.telemetry.logging import configure_logging
from busllm.topology.child import ChildCommand, stage_command
from busllm.topology.listeners import Listeners
from busllm.topology.placement import PlacedProcess
from busllm.topology.read import load_topology
from busllm.topology.restarts import RestartTimings
from busllm.topology.supervise import SupervisionTimings
from busllm.topology.up import UpOptions, run_up

TIMINGS = SupervisionTimings(
    restart=RestartTimings(first_pause_s=0.05, max_pause_s=0.2, limit=2, window_s=60.0),
    silent_s=1.0,
    look_s=0.05,
    stop_s=5.0,
    hurried_stop_s=0.5,
)


def main(file: str, behaviours: dict[str, str]) -> int:
    topology = load_topology(file)

    def command_for(placed: PlacedProcess, url: str | None, listeners: Listeners) -> ChildCommand:
        real = stage_command(placed, topology_file=file, bus_url=url, listen_fds=listeners.fds)
        behaviour = behaviours.get(placed.stages[0].kind, "steady")
        fake = Path(__file__).with_name("fake_stage.py")
        arguments = (sys.executable, str(fake), placed.name, behaviour, topology.cluster)
        return ChildCommand(arguments, real.environment, real.inherited_fds)

    configure_logging()
    options = UpOptions(topology=topology, host="here", timings=TIMINGS, command_for=command_for)
    try:
        return run_up(options, prepare=lambda: print("prepared", flush=True))
    except BusllmError as error:
        print(f"error: {error}", flush=True)
        return exit_status(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], dict(word.split("=") for word in sys.argv[2:])))
