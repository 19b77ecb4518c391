"""Measures what the cores can and how long steps take, and prints how near the steps come.

    python -m bench.limits [--quantization auto] [--context 160] [--model NAME] [--beside comparison.json]

A step cannot be faster than its bytes can be read by all cores together, nor than its products can be computed by each
of them. Both bounds are of this machine in this minute: measure where nothing else runs. From the bounds of steps
follow those of the rows of a comparison; a file of `make bench` puts what it measured beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.compare.machine import this_machine
from bench.compare.results import load
from bench.compare.rows import Figure
from bench.compare.summary import lines_of
from bench.limits.loads import LOADS
from bench.limits.work import Product, Rows, Work, work_of
from busllm.engine.openmp import calm_openmp
from busllm.errors import BusllmError

BATCHES = (1, 8, 32, 64)
CHUNK = 256
_FREE_SHARE = 0.9


class Peaks(msgspec.Struct, frozen=True):
    """What the machine can.

    Attributes:
        num_cores: that a step may use.
        read_one, read_all: bytes per second, of one core and of all together.
        multiply_one, multiply_all: multiply-adds per second, likewise.
    """

    num_cores: int
    read_one: float
    read_all: float
    multiply_one: Mapping[Product, float]
    multiply_all: Mapping[Product, float]

    def memory_s(self, work: Work) -> float:
        """Least time in which a step's bytes are read."""
        return (work.weight_bytes + work.kv_bytes) / max(self.read_one, self.read_all)

    def arithmetic_s(self, work: Work) -> float:
        """Least time in which a step's products are computed, as if all cores did at once what one does alone."""
        return sum(count / self.multiply_one[kind] / self.num_cores for kind, count in work.multiply_adds.items())

    @property
    def is_disturbed(self) -> bool:
        """Whether all cores together did clearly less than each alone: they share units, or somebody was at work."""
        return any(
            self.multiply_all[kind] < _FREE_SHARE * self.num_cores * one for kind, one in self.multiply_one.items()
        )


def steps(context: int) -> dict[str, list[Rows]]:
    """The steps that are looked at, by name."""
    decoding = {
        f"{count} sequence{'s' if count > 1 else ''}": [Rows(n, context - 1, 1) for n in range(count)]
        for count in BATCHES
    }
    return decoding | {f"a prompt chunk of {CHUNK}": [Rows(0, 0, CHUNK)]}


def table(peaks: Peaks, works: Mapping[str, Work], measured_s: Mapping[str, float]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    head = ["", "weights, MB", "keys and values, MB", *(f"{kind.value}, M" for kind in Product)]
    head += ["memory, ms", "arithmetic, ms", "measured, ms", "measured / bound"]
    yield _line(head)
    yield "|---|" + "---:|" * (len(head) - 1)
    for name, work in works.items():
        bounds_s = peaks.memory_s(work), peaks.arithmetic_s(work)
        cells = [
            work.weight_bytes / 1e6,
            work.kv_bytes / 1e6,
            *(work.multiply_adds.get(kind, 0) / 1e6 for kind in Product),
        ]
        cells += [1e3 * bounds_s[0], 1e3 * bounds_s[1], 1e3 * measured_s[name]]
        yield _line([name, *map(_number, cells), f"{measured_s[name] / max(bounds_s):.1f}"])


def table_of_loads(best: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[str]:
    """The rows of the comparison, in tokens or requests per second."""
    yield _line(["row", "per second", "at best", "measured", "at best / measured"])
    yield "|---|---|---:|---:|---:|"
    for key, value in best.items():
        unit = "requests" if LOADS[key].figure is Figure.REQUESTS else "tokens"
        found = measured.get(key)
        cells = ["–", "–"] if found is None else [_number(found), f"{value / found:.1f}"]
        yield _line([key, unit, _number(value), *cells])


def measured_rows(path: Path, quantization: str) -> dict[str, float]:
    """Medians of our server with that format."""
    name = f"busllm-{quantization}"
    return {
        line.row.key: line.spreads[name].median
        for line in lines_of(load(path))
        if line.row.key in LOADS and line.figure is LOADS[line.row.key].figure and name in line.spreads
    }


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _peaks() -> Peaks:
    from bench.limits.peaks import multiply_adds_per_s, read_bytes_per_s
    from busllm.engine.cpu.threads import num_threads

    every = num_threads()
    return Peaks(
        num_cores=every,
        read_one=read_bytes_per_s(1),
        read_all=read_bytes_per_s(every),
        multiply_one={kind: multiply_adds_per_s(kind, 1) for kind in Product},
        multiply_all={kind: multiply_adds_per_s(kind, every) for kind in Product},
    )


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto", choices=["auto", "none", "int8", "int4"])
    parser.add_argument("--context", type=int, default=160, help="tokens of each decoding sequence")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="comparison.json of `make bench`, on this machine")
    arguments = parser.parse_args()
    calm_openmp()  # before torch is imported
    from bench.cpu_forward import Steps, check_context
    from busllm.engine.loader import LoadConfig, load_runner

    runner = load_runner(
        arguments.model, LoadConfig(device="cpu", attention="cpu", quantization=arguments.quantization)
    )
    decoder: Any = runner._decoder
    check_context(parser, arguments.context, decoder.config.max_context_tokens)
    peaks = _peaks()  # the kernels' folder is chosen by now
    rows_of = steps(arguments.context)
    timed = Steps(decoder, arguments.context)
    measured_s = {name: sum(timed.time(rows)) / 1e3 for name, rows in rows_of.items()}
    works = {name: work_of(decoder.config, decoder._packed, rows) for name, rows in rows_of.items()}
    machine = this_machine()
    print(f"{machine.cpu}, {peaks.num_cores} cores, commit {machine.commit}; {runner.model.attention}")
    print(f"one core, all cores: reads {peaks.read_one / 1e9:.0f}, {peaks.read_all / 1e9:.0f} GB/s")
    for kind in Product:
        one, every = peaks.multiply_one[kind] / 1e9, peaks.multiply_all[kind] / 1e9
        print(f"{kind.value}: {one:.0f}, {every:.0f} thousand million multiply-adds per second")
    if peaks.is_disturbed:
        print("All cores together computed less than each alone: other programs are at work, or the cores share units.")
    print()
    print("\n".join(table(peaks, works, measured_s)))
    print()

    def bound_s(rows: Sequence[Rows]) -> float:
        work = work_of(decoder.config, decoder._packed, rows)
        return max(peaks.memory_s(work), peaks.arithmetic_s(work))

    measured = {} if arguments.beside is None else measured_rows(arguments.beside, arguments.quantization)
    print("\n".join(table_of_loads({key: row.at_best(bound_s) for key, row in LOADS.items()}, measured)))


if __name__ == "__main__":
    try:
        main()
    except BusllmError as error:
        sys.exit(f"bench: {error.message}")
