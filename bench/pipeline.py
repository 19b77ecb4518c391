"""What the pipeline around the engine costs: microseconds of CPU time per token, hop by hop and process by process.

    python -m bench.pipeline [--streams 1 8 64] [--step-time 0.001] [--hops] [--servers]

The null engine stands for the model, so all that is measured is busllm itself: planning, the bus, text, HTTP. CPU time
depends less on what else the machine does than time does, yet caches are shared: measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.pipeline_hops import bus_costs, hop_costs
from bench.pipeline_servers import PLACEMENTS, Load, measure
from busllm.telemetry.logging import configure_logging

STREAMS = (1, 8, 64)


def main() -> None:
    """Measures what the arguments ask for and prints it as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="streams at the same time (1 8 64)")
    parser.add_argument("--step-time", type=float, default=0.001, metavar="S", help="of the null engine (0.001)")
    parser.add_argument("--hops", action="store_true", help="only the hops")
    parser.add_argument("--servers", action="store_true", help="only the servers")
    arguments = parser.parse_args()
    configure_logging("warning")
    if not arguments.servers:
        print_hops(arguments.streams)
    if not arguments.hops:
        print_servers(arguments.streams, arguments.step_time)


def print_hops(streams: Sequence[int]) -> None:
    """One column per number of streams."""
    hops = {number: hop_costs(number) for number in streams}
    buses = {number: bus_costs(number) for number in streams}
    _print_row("µs per token", *(f"{number} streams" for number in streams))
    _print_row("---", *("---:" for _ in streams))
    for hop in hops[streams[0]]:
        _print_row(hop, *(f"{hops[number][hop]:.2f}" for number in streams))
    for bus in buses[streams[0]]:
        _print_row(
            f"{bus} bus: publish and receive, per message of a step",
            *(f"{buses[number][bus]:.1f}" for number in streams),
        )
    print()


def print_servers(streams: Sequence[int], step_time_s: float) -> None:
    """One row per load."""
    _print_row("placement", "streams", "tokens/s", "events per token", "CPU µs per token", "of which")
    _print_row("---", "---:", "---:", "---:", "---:", "---")
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            for load in measure(placement, tuple(streams), step_time_s, Path(directory)):
                _print_load(load)


def _print_load(load: Load) -> None:
    shares = ", ".join(f"{name} {used:.1f}" for name, used in sorted(load.cpu_us.items(), key=lambda item: -item[1]))
    _print_row(
        load.placement,
        str(load.streams),
        f"{load.output_tokens_per_s:,.0f}",
        f"{load.events_per_token:.3f}",
        f"{sum(load.cpu_us.values()):.1f}",
        shares,
    )


def _print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
