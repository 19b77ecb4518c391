"""Rank 0's runner of a model that is split.

Owns: the order of its start: load the own part, open the store, gather the others, meet them.
Does not know: the bus (`rank_leader.py`), how the engine is sized (`build_engine.py`).
Next on the path: `engine/parallel/runner.py`.
"""

from __future__ import annotations

import msgspec

from busllm.engine.parallel.group import Alone
from busllm.engine.parallel.runner import ParallelRunner
from busllm.engine.parallel.shard import Shard
from busllm.engine.runner import Runner
from busllm.grammar.compiler import GrammarCompiler
from busllm.model_store.files import ModelFiles
from busllm.stages.load_model import choose_device, model_runner, null_runner
from busllm.stages.scheduler.rank_leader import RankLeader
from busllm.topology.config import ModelConfig, SchedulerConfig
from busllm.topology.ranks import MeetingAddress


class Leading(msgspec.Struct, frozen=True):
    """What rank 0 needs to lead.

    Attributes:
        leader: its link to the others.
        address: where they meet.
        num_beside: ranks of the replica on this host, itself included.
        device_number: its number among the ranks of all replicas on this host.
    """

    leader: RankLeader
    address: MeetingAddress
    num_beside: int
    device_number: int


def leading_runner(
    files: ModelFiles, model: ModelConfig, scheduler: SchedulerConfig, leading: Leading, grammars: GrammarCompiler
) -> Runner:
    """Loads this rank's part and returns when the others are there.

    Raises:
        ModelError: the model cannot be served, or not by so many ranks.
        EngineError: the ranks do not get together.
    """
    shard = Shard(0, scheduler.tensor_parallel)
    leader, address = leading.leader, leading.address
    if files.is_null:
        alone, own = Alone(shard), null_runner(model, grammars)
        leader.gather(alone, None, own.model.fingerprint)
        return ParallelRunner(own, leader, alone)
    device = choose_device(scheduler, leading.device_number)
    from busllm.engine.parallel.torch_group import Store, TorchGroup  # imports torch

    group = TorchGroup(shard, device)
    own = model_runner(files, model, scheduler, device, group=group, grammars=grammars)
    store = Store(address.listen.host, address.listen.port)
    epoch = leader.gather(group, (address.host, store.port), own.model.fingerprint)
    group.connect(address.host, store.port, epoch)
    return ParallelRunner(own, leader, group, keeps=store)
