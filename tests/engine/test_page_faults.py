"""Faults in an engine's own books, put in on purpose: the checks of a test notice them."""

from __future__ import annotations

import numpy as np
import pytest

from busllm.engine.engine import Engine, EngineConfig
from busllm.engine.live_sequence import LiveSequence, pack_ids
from busllm.engine.null import NullRunner
from busllm.engine.page_tables import PageTables
from busllm.engine.radix import Node, RadixTree
from busllm.errors import EngineError, IntegrityError
from busllm.sampling import SamplingParams
from busllm.testing.engine_driver import EngineDriver, sequence_request


def busy_driver(num_pages: int = 12) -> EngineDriver:
    config = EngineConfig(num_pages=num_pages, page_tokens=2, step_tokens=8, max_running=4, expected_output_tokens=0)
    run = EngineDriver(Engine(NullRunner(), config))
    for seed in range(3):
        run.submit(sequence_request(f"u{seed}", [65 + seed] * 5, SamplingParams(max_tokens=8)))
    return run


def test_a_page_that_a_sequence_loses_turns_up_in_the_integrity_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_without_the_last_page(self: PageTables, seq: LiveSequence) -> None:
        seq.table.pop()
        close(self, seq)

    close = PageTables.close
    monkeypatch.setattr(PageTables, "close", close_without_the_last_page)
    with pytest.raises(IntegrityError, match="has 1 references, but 0 are held"):
        busy_driver().run()


def test_a_page_that_is_given_to_two_sequences_turns_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow_without_a_reference(self: PageTables, seq: LiveSequence, num_tokens: int) -> bool:
        before = len(seq.table)
        has_room = grow(self, seq, num_tokens)
        for page in seq.table[before:]:
            self.pool.decref(page)
        return has_room

    grow = PageTables.grow
    monkeypatch.setattr(PageTables, "grow", grow_without_a_reference)
    with pytest.raises(EngineError):
        busy_driver().run()


def test_a_prefix_of_another_sequence_turns_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def match_something_else(self: RadixTree, namespace: bytes, ids: bytes, max_pages: int) -> Node | None:
        return match(self, namespace, pack_ids(np.array([65] * 5)), max_pages)

    match = RadixTree.match
    monkeypatch.setattr(RadixTree, "match", match_something_else)
    with pytest.raises(EngineError, match="relies on position 1 in page"):
        busy_driver().run()
