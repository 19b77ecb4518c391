"""`python -m bench.compare`: measures, or shows what was measured.

Owns: the flags and the files.
Does not know: rows (`rows.py`), servers (`peers/`), turns (`rounds.py`).
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from bench.compare import results
from bench.compare.machine import this_machine
from bench.compare.models import PeerModel
from bench.compare.page import page
from bench.compare.peers.choice import FOLDER_VARIABLE, OTHERS, other, peers_folder
from bench.compare.peers.ours import QUANTIZATIONS, OurConfig, OurPeer
from bench.compare.peers.peer import Peer
from bench.compare.results import Comparison, RowFacts
from bench.compare.rounds import Schedule, visits
from bench.compare.rows import ROWS, chosen_rows, quick
from bench.compare.text_table import show
from busllm.cli.terminal import console
from busllm.errors import BusllmError, ConfigError
from busllm.model_store.files import NULL_SOURCE
from busllm.topology.config import DEFAULT_KV_TOKENS

_ROUNDS = 3
_FIGURES, _PAGE = "comparison.json", "comparison.html"


def main(words: Sequence[str] | None = None) -> int:
    """Does what the flags say. Status 1: something failed; 2: it cannot be done."""
    arguments = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, _leave)
    try:
        if arguments.install is not None:
            return _install(arguments)
        return _show(arguments.show) if arguments.show is not None else _compare(arguments)
    except BusllmError as error:
        print(f"bench: {error.message}", file=sys.stderr)
        return 2


def _leave(number: int, _frame: FrameType | None) -> None:
    """Ends by way of every `finally`, where the server that runs is ended too."""
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description="Compares busllm with other servers.")
    keys = [row.key for row in ROWS]
    parser.add_argument(
        "--rows", metavar="KEY,…", type=_some_of(keys), default=keys, help=f"only these of {', '.join(keys)}"
    )
    parser.add_argument("--rounds", metavar="N", type=int, help=f"how often each server has its turn ({_ROUNDS})")
    parser.add_argument(
        "--peers",
        metavar="NAME,…",
        type=_some_of(list(OTHERS)),
        help=f"only these of {', '.join(OTHERS)}; '' = none; without it, all that are installed",
    )
    parser.add_argument(
        "--quantization",
        metavar="FORMAT,…",
        type=_some_of(list(QUANTIZATIONS)),
        default=["auto"],
        help=f"weight formats of ours: some of {', '.join(QUANTIZATIONS)}, or all (auto)",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of each load, one round, no first start")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the first round (0)")
    parser.add_argument("--model", metavar="NAME", default="smollm2-135m", help="model (smollm2-135m)")
    parser.add_argument("--kv-tokens", metavar="N", type=int, default=DEFAULT_KV_TOKENS, help="of every server's cache")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("bench-results"), help="(bench-results)")
    parser.add_argument("--show", metavar="FILE.json", type=Path, help="measure nothing, show this; the page anew")
    parser.add_argument(
        "--install",
        metavar="NAME,…",
        type=_some_of(list(OTHERS)),
        help=f"install these servers into ${FOLDER_VARIABLE} ({peers_folder()}) and end",
    )
    return parser


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        wanted = list(known) if text == "all" else [word.strip() for word in text.split(",") if word.strip()]
        unknown = [word for word in wanted if word not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return wanted

    return names


def _install(arguments: argparse.Namespace) -> int:
    for peer in _others(arguments.install, arguments):
        print(f"installing {peer.name}", file=sys.stderr)
        peer.install()
        print(peer.facts().version)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    peers = _peers(arguments, out)
    rows = chosen_rows(arguments.rows)
    rows = quick(rows) if arguments.quick else rows
    schedule = Schedule(
        rows=tuple(rows),
        num_rounds=arguments.rounds or (1 if arguments.quick else _ROUNDS),
        seed=arguments.seed,
        rehearse=not arguments.quick,
        log_folder=out / "logs",
    )
    comparison = Comparison(
        began_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=arguments.model,
        machine=this_machine(),
        servers=[peer.facts() for peer in peers],
        rows=[RowFacts(key=row.key, title=row.title) for row in rows],
    )
    for visit in visits(peers, schedule, tell=lambda text: print(text, file=sys.stderr, flush=True)):
        comparison.visits.append(visit)
        results.save(comparison, out / _FIGURES)
    return _show(out / _FIGURES)


def _peers(arguments: argparse.Namespace, out: Path) -> list[Peer]:
    """Ours in each format, then the others.

    Raises:
        ConfigError: one that was asked for is not installed.
    """
    ours: list[Peer] = [
        OurPeer(OurConfig(arguments.model, quantization, arguments.kv_tokens), out / "servers")
        for quantization in arguments.quantization
    ]
    if arguments.model == NULL_SOURCE:
        return ours
    names = list(OTHERS) if arguments.peers is None else arguments.peers
    others = _others(names, arguments)
    absent = [peer.name for peer in others if not peer.is_installed]
    if absent and arguments.peers is not None:
        listed = ",".join(absent)
        raise ConfigError(
            f"{listed} is not installed in {peers_folder()}; install it: python -m bench.compare --install {listed}"
        )
    return ours + [peer for peer in others if peer.is_installed]


def _others(names: Sequence[str], arguments: argparse.Namespace) -> list[Peer]:
    OurPeer(OurConfig(arguments.model), arguments.out).install()  # fetches the model, of which others get their files
    model = PeerModel.of(arguments.model, peers_folder() / "models")
    return [other(name, model, arguments.kv_tokens) for name in names]


def _show(figures: Path) -> int:
    comparison = results.load(figures)
    written = figures.with_suffix(".html")
    written.write_text(page(comparison))
    show(comparison, console())
    print(f"\n{figures}\n{written}")
    return 1 if comparison.errors else 0


if __name__ == "__main__":
    sys.exit(main())
