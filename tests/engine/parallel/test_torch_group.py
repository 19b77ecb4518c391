"""What ranks do together over gloo, as threads: the same values everywhere, and an error where somebody is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from busllm.engine.host_copy import StepMark
from busllm.engine.parallel import torch_group
from busllm.engine.parallel.group import hangs_for_s
from busllm.engine.parallel.shard import Shard
from busllm.engine.parallel.torch_group import MEETING_TIMEOUT_S, Mark, Store, TorchGroup
from busllm.errors import EngineError, ModelError

SHORT_S = 0.3
PATIENCE_S = 20.0


Call = Callable[..., list[Future[Any]]]


@contextmanager
def ranks(size: int, timeout_s: float = 5.0, mark: Callable[[torch.device], Mark] = StepMark) -> Iterator[Call]:
    """Connected groups; gives a function that has every rank call something."""
    store = Store("127.0.0.1", 0)
    groups = [TorchGroup(Shard(rank, size), "cpu", timeout_s=timeout_s, mark=mark) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        for done in [threads.submit(group.connect, "127.0.0.1", store.port, "epoch") for group in groups]:
            done.result(PATIENCE_S)

        def call(function: Callable[[TorchGroup], Any], among: range | None = None) -> list[Future[Any]]:
            return [threads.submit(function, groups[rank]) for rank in among or range(size)]

        yield call


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE_S) for future in futures]


def part_of(rank: int) -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_everywhere_and_added_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    with ranks(3) as call:
        sums = results(call(lambda group: group.sum(part_of(group.shard.rank).to(dtype))))
    expected = (part_of(0).to(dtype).float() + part_of(1).to(dtype).float() + part_of(2).to(dtype).float()).to(dtype)
    for total in sums:
        assert total.dtype == dtype
        assert torch.equal(total, expected)


def test_a_row_of_a_sum_does_not_depend_on_the_other_rows() -> None:
    with ranks(3) as call:
        whole = results(call(lambda group: group.sum(part_of(group.shard.rank))))[0]
        alone = results(call(lambda group: group.sum(part_of(group.shard.rank)[4:5])))[0]
    assert torch.equal(alone, whole[4:5])


def test_the_first_rank_gathers_and_is_heard() -> None:
    with ranks(3) as call:
        gathered = results(call(lambda group: group.gather(torch.tensor([group.shard.rank]))))
        heard = results(call(lambda group: group.from_first(torch.tensor([group.shard.rank + 40]))))
    assert [part.item() for part in gathered[0]] == [0, 1, 2]
    assert gathered[1:] == [None, None]
    assert [values.item() for values in heard] == [40, 40, 40]


def test_a_rank_whose_mates_do_not_come_along_gets_an_error() -> None:
    with ranks(2, timeout_s=SHORT_S) as call:
        (left,) = call(lambda group: group.sum(torch.ones(3)), range(1, 2))
        with pytest.raises(EngineError, match="Rank 1 was left alone"):
            left.result(PATIENCE_S)


def test_a_rank_waits_at_the_door_for_longer_than_an_operation_may_last() -> None:
    with ranks(2, timeout_s=SHORT_S) as call:
        (waiting,) = call(lambda group: group.enter(7), range(1, 2))
        with pytest.raises(TimeoutError):
            waiting.result(3 * SHORT_S)
        results(call(lambda group: group.enter(7), range(1)))
        waiting.result(PATIENCE_S)


def test_a_rank_that_comes_with_another_step_gets_an_error() -> None:
    with ranks(2) as call:
        _, other = call(lambda group: group.enter(group.shard.rank))
        with pytest.raises(EngineError, match="came with step 1, the first with 0"):
            other.result(PATIENCE_S)


def test_a_meeting_of_another_name_is_another_meeting() -> None:
    store = Store("127.0.0.1", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("busllm.engine.parallel.torch_group.MEETING_TIMEOUT_S", SHORT_S)
        groups = [TorchGroup(Shard(rank, 2), "cpu") for rank in range(2)]
        with ThreadPoolExecutor(2) as threads:
            calls = [
                threads.submit(group.connect, "127.0.0.1", store.port, f"epoch {group.shard.rank}") for group in groups
            ]
            for connecting in calls:
                with pytest.raises(EngineError, match="did not meet the others"):
                    connecting.result(PATIENCE_S)


def test_an_address_that_is_taken_is_named() -> None:
    store = Store("127.0.0.1", 0)
    with pytest.raises(EngineError, match=rf"127\.0\.0\.1:{store.port}.*collective_listen"):
        Store("127.0.0.1", store.port)


class LateDevice:
    """Runs behind the host: a mark in its queue is passed when the test says so."""

    def __init__(self) -> None:
        self.marks: list[LateMark] = []

    def mark(self, _: torch.device) -> Mark:
        self.marks.append(LateMark())
        return self.marks[-1]


class LateMark:
    is_passed = False

    def wait(self) -> None:
        self.is_passed = True


def test_an_operation_that_the_host_has_left_behind_lasts_until_the_device_is_done() -> None:
    device = LateDevice()
    with ranks(1, mark=device.mark) as call:
        (group,) = results(call(lambda group: group))
        for mark in device.marks:
            mark.is_passed = True
        assert group.waits_since_s is None
        began = time.monotonic()
        results(call(lambda group: (group.sum(torch.ones(1)), group.from_first(torch.ones(1)))))
        first, second = device.marks[-2:]
        since = group.waits_since_s
        assert since is not None and began <= since <= time.monotonic()
        first.is_passed = True
        assert group.waits_since_s is not None and group.waits_since_s > since
        second.is_passed = True
        assert group.waits_since_s is None


def test_operations_that_are_done_are_forgotten() -> None:
    with ranks(1) as call:
        for _ in range(10):
            results(call(lambda group: group.sum(torch.ones(1))))
        assert results(call(lambda group: len(group._behind))) == [1]


class Recorded:
    """A process group whose operations tell their names and time limits."""

    def __init__(self, inner: Any, told: list[tuple[str, float]]) -> None:
        self._inner = inner
        self._told = told

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._inner, name)
        if name not in ("allgather", "gather", "broadcast"):
            return operation

        def tell(*arguments: Any) -> Any:
            self._told.append((name, arguments[-1].timeout.total_seconds()))
            return operation(*arguments)

        return tell


def test_ranks_that_meet_do_each_operation_once_with_the_time_that_a_meeting_may_take() -> None:
    told: list[tuple[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        original = torch_group._gloo
        patch.setattr(torch_group, "_gloo", lambda *arguments: Recorded(original(*arguments), told))
        with ranks(1, timeout_s=SHORT_S) as call:
            assert told == [(name, MEETING_TIMEOUT_S) for name in ("allgather", "gather", "broadcast")]
            results(call(lambda group: group.sum(torch.ones(1))))
            assert told[-1] == ("allgather", SHORT_S)


def test_a_rank_that_meets_is_not_watched() -> None:
    group = TorchGroup(Shard(0, 2), "cpu")
    group._waits_since_s = 0.0
    assert group.waits_since_s is None


class Stuck:
    """A group that has been in an operation since a time."""

    def __init__(self, waits_since_s: float | None) -> None:
        self.waits_since_s = waits_since_s


@pytest.mark.parametrize(("seconds", "hangs"), [(None, False), (1.0, False), (7.0, True)])
def test_an_operation_hangs_when_it_lasts_longer_than_its_limit(seconds: float | None, hangs: bool) -> None:
    since = None if seconds is None else time.monotonic() - seconds
    assert (hangs_for_s(Stuck(since)) is not None) == hangs  # type: ignore[arg-type]


def test_a_group_says_since_when_it_waits() -> None:
    with ranks(2) as call:
        begun = threading.Event()

        def wait(group: TorchGroup) -> None:
            begun.set()
            group.sum(torch.ones(1))
            assert group.waits_since_s is None

        seen: list[TorchGroup] = []
        (waiting,) = call(lambda group: (seen.append(group), wait(group)), range(1, 2))
        begun.wait(PATIENCE_S)
        while seen[0].waits_since_s is None:
            time.sleep(0.001)
        results(call(lambda group: group.sum(torch.ones(1)), range(1)))
        waiting.result(PATIENCE_S)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(6, 2, 2), (8, 2, 4), (8, 1, 4), (12, 4, 2)])
def test_the_ranks_query_heads_read_the_key_value_heads_that_they_have(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    shared = num_heads // num_kv_heads
    heads = []
    for rank in range(num_ranks):
        own, own_kv = Shard(rank, num_ranks).heads(num_heads), Shard(rank, num_ranks).kv_heads(num_kv_heads)
        heads += range(own.start, own.stop)
        assert {head // shared for head in range(own.start, own.stop)} == set(range(own_kv.start, own_kv.stop))
    assert heads == list(range(num_heads))


def test_heads_that_can_neither_be_split_nor_repeated_are_refused() -> None:
    with pytest.raises(ModelError, match="3 key-value heads"):
        Shard(0, 2).kv_heads(3)


@pytest.mark.parametrize("size", [1, 7, 319, 320])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_spans_cover_a_dimension_evenly(size: int, num_ranks: int) -> None:
    spans = [Shard(rank, num_ranks).span(size) for rank in range(num_ranks)]
    assert [index for span in spans for index in range(span.start, span.stop)] == list(range(size))
    sizes = {span.stop - span.start for span in spans}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == Shard(0, num_ranks).widest(size)
