"""Whose turn it is: one server at a time, all of them in every round, so that a slow hour meets each alike.

Owns: the order of visits, the seeds, keeping what is there after every visit.
Does not know: how a server is started (`peers/`), how a row is measured (`client.py`).
Next on the path: `results.py`, then `summary.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bench.compare.client import measure_row
from bench.compare.peers.peer import Peer
from bench.compare.results import RowResult, ServerFacts, Visit
from bench.compare.rows import Row
from bench.compare.server import RunningServer, ServerFailure, free_port, running

_SEEDS_PER_ROUND = 1000

Tell = Callable[[str], None]


class Schedule(msgspec.Struct, frozen=True):
    """What is to be done.

    Attributes:
        rows: in this order on each server.
        num_rounds: how often each server has its turn.
        seed: of the first round; the others have others.
        rehearse: whether every server is started once beforehand, unmeasured, so that its caches are filled.
        log_folder: where the servers' logs go.
        patience_s: how long a start may take.
    """

    rows: tuple[Row, ...]
    num_rounds: int
    seed: int
    rehearse: bool
    log_folder: Path
    patience_s: float = 600.0


def visits(peers: Sequence[Peer], schedule: Schedule, tell: Tell) -> Iterator[Visit]:
    """Measures; yields each visit as soon as it is over. A server that fails is no reason to stop."""
    schedule.log_folder.mkdir(parents=True, exist_ok=True)
    if schedule.rehearse:
        for peer in peers:
            tell(f"{peer.name}: a first start, which fills caches")
            _visit(peer, msgspec.structs.replace(schedule, rows=()), round_number=0, tell=tell)
    for number in range(1, schedule.num_rounds + 1):
        for peer in peers:
            tell(f"{peer.name}: round {number} of {schedule.num_rounds}")
            yield _visit(peer, schedule, number, tell)


def _visit(peer: Peer, schedule: Schedule, round_number: int, tell: Tell) -> Visit:
    load_before, _, _ = os.getloadavg()
    seed = round_seed(schedule.seed, round_number)
    rows: dict[str, RowResult] = {}
    error = None
    port = free_port()
    log = schedule.log_folder / f"{peer.name}-{round_number}.log"
    try:
        launch = peer.launch(port)
        with running(launch, port=port, model=peer.served_model, log=log, patience_s=schedule.patience_s) as server:
            for row in schedule.rows:
                server.check()
                rows[row.key] = _row(row, schedule.rows, peer, server, seed)
                tell(f"  {row.key}: {_told(row, rows[row.key])}")
    except ServerFailure as failure:
        error = str(failure)
        tell(f"  {error}")
    return Visit(
        server=peer.name,
        round_number=round_number,
        seed=seed,
        load_before=round(load_before, 2),
        rows=rows,
        error=error,
    )


def _row(row: Row, rows: Sequence[Row], peer: Peer, server: RunningServer, seed: int) -> RowResult:
    reason = why_left_out(row, peer.facts())
    if reason is not None:
        return RowResult(left_out=reason)
    return measure_row(row, server, peer, row_seed(row, rows, seed))


def why_left_out(row: Row, facts: ServerFacts) -> str | None:
    """Why a server cannot do a row in the configuration that it has; None when it can."""
    if row.longest_words < facts.max_sequence_tokens:
        return None
    return f"needs a sequence of {row.longest_words:,} tokens; each can have {facts.max_sequence_tokens:,}"


def round_seed(first: int, round_number: int) -> int:
    """The seed of a round, the same for all servers."""
    return first + _SEEDS_PER_ROUND * round_number


def row_seed(row: Row, rows: Sequence[Row], seed: int) -> int:
    """A row's own seed: a prompt that an earlier row has sent would be found in the prefix cache.

    A row with the requests of another has the seed of that one.
    """
    return seed + [known.key for known in rows].index(row.requests_of or row.key)


def _told(row: Row, result: RowResult) -> str:
    if result.left_out is not None:
        return f"left out, {result.left_out}"
    said = [
        f"{figure.title} {result.figures[figure.value]:.4g} {figure.unit}"
        for figure in row.figures[:2]
        if figure.value in result.figures
    ]
    return ", ".join([*said, *([result.error] if result.error is not None else [])])
