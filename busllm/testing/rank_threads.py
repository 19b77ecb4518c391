"""The ranks of one replica as threads of this process, over gloo: a model that is split, without processes or a bus.

Owns: the threads of the ranks behind the first, and the queues by which they get their orders.
Does not know: what is computed. What ranks owe to the bus is shown in `tests/stages` and `tests/end_to_end`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.parallel.runner import ParallelRunner
from busllm.engine.parallel.shard import Shard
from busllm.engine.parallel.torch_group import Store, TorchGroup
from busllm.engine.parallel.worker import RankWorker
from busllm.errors import BusllmError
from busllm.plan import StepPlan

_LOOPBACK = "127.0.0.1"
_Order = Callable[[RankWorker], None]


class ThreadRanks:
    """Implements `OtherRanks`: each order goes to every thread's queue.

    Attributes:
        failures: what ended threads before their time.
    """

    def __init__(self) -> None:
        self._orders: list[queue.Queue[_Order | None]] = []
        self.failures: list[BaseException] = []

    def allocate(self, **sizes: int) -> None:
        """See `OtherRanks`."""
        self._tell(lambda worker: worker.allocate(**sizes))

    def plan(self, plan: StepPlan) -> None:
        """See `OtherRanks`."""
        self._tell(lambda worker: worker.plan(plan))

    def stop(self) -> None:
        """Ends the threads after what they have been told."""
        self._tell(None)

    def start(self, make_worker: Callable[[], RankWorker]) -> threading.Thread:
        """Starts one more rank."""
        orders: queue.Queue[_Order | None] = queue.Queue()
        self._orders.append(orders)
        thread = threading.Thread(target=self._run, args=(make_worker, orders))
        thread.start()
        return thread

    def _tell(self, order: _Order | None) -> None:
        for orders in self._orders:
            orders.put(order)

    def _run(self, make_worker: Callable[[], RankWorker], orders: queue.Queue[_Order | None]) -> None:
        try:
            worker = make_worker()
            while (order := orders.get()) is not None:
                order(worker)
            worker.close()
        except BusllmError as error:
            self.failures.append(error)


@contextmanager
def parallel_runner(directory: Path, num_ranks: int, **config: Any) -> Iterator[ParallelRunner]:
    """A model split among `num_ranks` threads on CPU; they end with the block.

    Args:
        directory: of the model.
        config: of `LoadConfig`.
    """
    store = Store(_LOOPBACK, 0)
    ranks = ThreadRanks()
    load_config = LoadConfig(**({"device": "cpu", "dtype": "float32", "attention": "torch"} | config))

    def load(rank: int) -> tuple[Any, TorchGroup]:
        group = TorchGroup(Shard(rank, num_ranks), "cpu")
        runner = load_runner(str(directory), load_config, group)
        group.connect(_LOOPBACK, store.port, "epoch")
        return runner, group

    threads = [ranks.start(lambda rank=rank: RankWorker(*load(rank))) for rank in range(1, num_ranks)]  # type: ignore[misc]
    try:
        runner, group = load(0)
        yield ParallelRunner(runner, ranks, group)
        assert not ranks.failures, ranks.failures
        ranks.stop()
        for thread in threads:
            thread.join()
        group.close()
    finally:
        ranks.stop()
