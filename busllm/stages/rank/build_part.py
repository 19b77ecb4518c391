"""A rank's part of the model, loaded and ready to meet the others.

Owns: what a rank behind the first loads.
Does not know: the bus. Called in the rank's thread.
Next on the path: `engine/parallel/worker.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from busllm.engine.parallel.group import Alone, Group
from busllm.engine.parallel.shard import Shard
from busllm.engine.parallel.worker import RankWorker
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.files import ModelFiles
from busllm.stages.load_model import choose_device, model_runner, null_runner
from busllm.text.vocabulary import load_vocabulary
from busllm.topology.config import ModelConfig, SchedulerConfig


@dataclass(frozen=True)
class RankPart:
    """A loaded part.

    Attributes:
        worker: executes orders.
        group: all ranks.
        connect: meets them: (host, port, name of the meeting).
    """

    worker: RankWorker
    group: Group
    connect: Callable[[str | None, int | None, str], None]


def build_part(
    files: ModelFiles, model: ModelConfig, scheduler: SchedulerConfig, shard: Shard, device_number: int
) -> RankPart:
    """Loads.

    Raises:
        ModelError: the model cannot be served, or not by so many ranks.
    """
    if files.is_null:
        alone, grammars = Alone(shard), GrammarCompiler(partial(load_vocabulary, files))  # every null rank samples
        return RankPart(RankWorker(null_runner(model, grammars), alone), alone, lambda host, port, epoch: None)
    device = choose_device(scheduler, device_number)
    from busllm.engine.parallel.torch_group import TorchGroup  # imports torch

    group = TorchGroup(shard, device)
    worker = RankWorker(model_runner(files, model, scheduler, device, group=group), group)

    def connect(host: str | None, port: int | None, epoch: str) -> None:
        assert host is not None and port is not None  # rank 0 has opened its store
        group.connect(host, port, epoch)

    return RankPart(worker, group, connect)
