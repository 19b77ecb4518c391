"""Measures how busllm grows, prints tables, writes figures and plots.

    python -m bench.scaling [--only [planner prefix_cache stages buses steps]] [--model NAME] [--out docs/plots]

What is measured anew takes the place of what was there; the other figures stay. Times are CPU times, the smallest of
some runs, except those of the model's steps, for which a clock on the wall must do: take these on a quiet machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.compare.machine import this_machine
from bench.compare.results import Machine
from bench.scaling.figure import Figure, Results, load, save, table
from bench.scaling.plot import svg
from busllm.engine.openmp import calm_openmp
from busllm.telemetry.logging import configure_logging

GROUPS = ("planner", "prefix_cache", "stages", "buses", "steps")
PLOTS = Path(__file__).parents[2] / "docs" / "plots"


def main(words: Sequence[str] | None = None) -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=GROUPS, help="groups of figures; none: draw anew")
    parser.add_argument("--model", default="smollm2-135m", help="of the steps")
    parser.add_argument("--out", type=Path, default=PLOTS, help="folder of figures.json, README.md and the plots")
    arguments = parser.parse_args(words)
    configure_logging("warning")
    calm_openmp()  # before torch is imported
    machine = this_machine()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "figures.json"
    results = load(file)
    for group in arguments.only:
        for figure in _measure(group, arguments.model):
            print(f"{figure.title}, {figure.y_label}\n\n{table(figure)}\n", flush=True)
            results.figures[figure.name] = (machine, figure)
    save(results, file)
    for name, (_, figure) in results.figures.items():
        (arguments.out / f"{name}.svg").write_text(svg(figure), encoding="utf-8")
    (arguments.out / "README.md").write_text(page(results), encoding="utf-8")


def _measure(group: str, model: str) -> Iterator[Figure]:
    """The figures of a group, imported when it is wanted: only the steps need a model."""
    match group:
        case "planner":
            from bench.scaling import planner

            return planner.figures()
        case "prefix_cache":
            from bench.scaling import prefix_cache

            return prefix_cache.figures()
        case "stages":
            from bench.scaling import stages

            return stages.figures()
        case "buses":
            from bench.scaling import buses

            return buses.figures()
        case "steps":
            from bench.scaling import steps

            return steps.figures(model)
    raise ValueError(f"there is no group {group!r}")


def page(results: Results) -> str:
    """All figures as tables, each with its machine."""
    parts = ["# Figures\n\nWritten by `python -m bench.scaling`; [Scaling](../scaling.md) explains them.\n"]
    for name in sorted(results.figures):
        machine, figure = results.figures[name]
        parts.append(
            f"## {figure.title}\n\n![{figure.title}]({name}.svg)\n\n"
            f"{figure.y_label}; measured on {_words(machine)}.\n\n{table(figure)}\n"
        )
    return "\n".join(parts)


def _words(machine: Machine) -> str:
    commit = f", commit {machine.commit}" if machine.commit else ""
    return f"{machine.cpu}, {machine.num_cores} cores{commit}"


if __name__ == "__main__":
    main()
