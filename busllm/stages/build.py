"""From the topology's words to the behaviours of stages.

Owns: which settings of the topology and of the model's description each stage gets.
Does not know: processes (`process.py`), the bus.

A stage's code is imported when it is built, so that a process loads no more than it runs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, assert_never

import msgspec

from busllm.actors.behaviour import Behaviour
from busllm.actors.clock import Timings
from busllm.actors.settings import ActorSettings
from busllm.messages.control import Versions
from busllm.model_store.description import ModelDescription, describe
from busllm.model_store.files import ModelFiles
from busllm.model_store.resolve import resolve
from busllm.requests.owner import RequestOwner
from busllm.telemetry.trace import TraceLevel
from busllm.topology.config import Topology, topology_hash
from busllm.topology.model_fit import check_heads
from busllm.topology.placement import StageId
from busllm.topology.ranks import device_number, meeting_address, num_ranks_beside

if TYPE_CHECKING:
    from busllm.stages.frontend.stage import FrontendStage

DRAIN_GRACE_S = 5.0  # beyond the frontends' own drain timeout


class StageBuilder:
    """Builds the stages of one topology.

    Args:
        bus_url: of the bus in use; None = it has none.

    Raises:
        ModelError: the model's files are missing or damaged.
        ConfigError: its heads cannot be shared out to so many ranks.
    """

    def __init__(self, topology: Topology, bus_url: str | None) -> None:
        self._topology = topology
        self._bus_url = bus_url
        self._files: ModelFiles = resolve(topology.model.source)
        check_heads(self._files, topology)
        self._model = _limited(describe(self._files), topology.model.max_context_tokens)

    def actor_settings(self) -> ActorSettings:
        """What all actors of this process have in common."""
        topology = self._topology
        return ActorSettings(
            cluster=topology.cluster,
            host=socket.gethostname(),
            versions=Versions(
                package=version("busllm"), topology=topology_hash(topology), model=self._model.fingerprint
            ),
            timings=Timings(
                resume_deadline_s=topology.frontend.resume_deadline_s,
                drain_timeout_s=topology.frontend.drain_timeout_s + DRAIN_GRACE_S,
            ),
            trace_level=TraceLevel(topology.trace.level),
        )

    def frontend(self, sockets: Sequence[socket.socket]) -> FrontendStage:
        """A frontend that listens on these sockets.

        Raises:
            ConfigError: the file of API keys cannot be used.
        """
        from busllm.stages.frontend.auth import read_api_keys
        from busllm.stages.frontend.settings import FrontendSettings, HttpTimings, Tls
        from busllm.stages.frontend.stage import FrontendStage

        config, model = self._topology.frontend, self._model
        settings = FrontendSettings(
            model_name=self._topology.model.name or self._files.name,
            max_model_len=model.max_context_tokens,
            vocab_size=model.vocab_size,
            has_chat_template=model.has_chat_template,
            created=int(time.time()),
            api_keys=frozenset() if config.api_keys_file is None else read_api_keys(config.api_keys_file),
            cors_origins=config.cors_origins,
            max_body_bytes=config.max_body_bytes,
            drain_timeout_s=config.drain_timeout_s,
            timings=HttpTimings(header_wait_s=config.header_wait_s),
            tls=None if config.tls is None else Tls(certificate=config.tls.certificate_file, key=config.tls.key_file),
        )
        return FrontendStage(settings, sockets, RequestOwner(config.max_queued))

    def behaviour(self, stage: StageId) -> Behaviour:
        """A fresh behaviour of a stage other than a frontend."""
        match stage.kind:
            case "tokenizer":
                from busllm.stages.tokenizer import TokenizerStage
                from busllm.text.tokenizer import load_tokenizer

                load = partial(load_tokenizer, self._files)
                model = self._model
                return TokenizerStage(load, model.max_context_tokens, model.vocab_size, model.eos_token_ids)
            case "detokenizer":
                from busllm.stages.detokenizer.stage import DetokenizerStage
                from busllm.text.tokenizer import load_tokenizer

                return DetokenizerStage(partial(load_tokenizer, self._files))
            case "scheduler":
                return self._rank(stage) if stage.rank else self._scheduler(stage)
            case "frontend":
                raise AssertionError("a frontend has sockets; see `frontend`")
            case _:
                assert_never(stage.kind)

    def _scheduler(self, stage: StageId) -> Behaviour:
        from busllm.stages.load_progress import LoadProgress
        from busllm.stages.scheduler.build_engine import build_engine
        from busllm.stages.scheduler.stage import SchedulerStage

        config, number = self._topology.scheduler, device_number(self._topology, stage)
        make = partial(build_engine, self._files, self._topology.model, config, device_number=number)
        if config.tensor_parallel == 1:
            progress = LoadProgress()
            return SchedulerStage(partial(make, progress=progress), progress)
        from busllm.stages.scheduler.build_leader import Leading
        from busllm.stages.scheduler.leading_stage import LeadingSchedulerStage
        from busllm.stages.scheduler.rank_leader import RankLeader

        leader = RankLeader(stage.index, config.tensor_parallel)
        address = meeting_address(self._topology, stage.index, self._bus_url)
        leading = Leading(leader, address, num_ranks_beside(self._topology, stage), number)
        return LeadingSchedulerStage(partial(make, leading=leading), leader)

    def _rank(self, stage: StageId) -> Behaviour:
        from busllm.engine.parallel.shard import Shard
        from busllm.stages.rank.build_part import build_part
        from busllm.stages.rank.stage import RankStage

        config = self._topology.scheduler
        shard = Shard(stage.rank, config.tensor_parallel)
        number = device_number(self._topology, stage)
        make = partial(build_part, self._files, self._topology.model, config, shard, number)
        return RankStage(stage.index, stage.rank, make)


def _limited(model: ModelDescription, max_context_tokens: int | None) -> ModelDescription:
    if max_context_tokens is None:
        return model
    return msgspec.structs.replace(model, max_context_tokens=min(max_context_tokens, model.max_context_tokens))
