"""Which process holds which stages."""

from __future__ import annotations

import pytest

from busllm.topology.config import Topology, topology_hash
from busllm.topology.placement import StageId, place
from busllm.topology.read import parse_topology


def layout(text: str) -> list[tuple[str, str]]:
    return [(placed.host, placed.name) for placed in place(parse_topology(text), "here")]


def test_by_default_light_stages_share_a_process_and_a_scheduler_has_its_own() -> None:
    assert layout("") == [("here", "frontend:0+tokenizer:0+detokenizer:0"), ("here", "scheduler:0")]


def test_by_default_stages_of_the_same_index_share_a_process() -> None:
    text = "frontend.count = 3\ntokenizer.count = 2\ndetokenizer.count = 1\nscheduler.count = 2"
    assert [name for _, name in layout(text)] == [
        "frontend:0+tokenizer:0+detokenizer:0",
        "frontend:1+tokenizer:1",
        "frontend:2",
        "scheduler:0",
        "scheduler:1",
    ]


def test_each_rank_has_a_process_of_its_own() -> None:
    assert [name for _, name in layout("scheduler.tensor_parallel = 2")][1:] == ["scheduler:0", "scheduler:0.1"]


def test_with_a_memory_bus_everything_shares_one_process() -> None:
    assert layout("bus.kind = 'memory'\nscheduler.count = 2") == [
        ("here", "frontend:0+tokenizer:0+scheduler:0+scheduler:1+detokenizer:0")
    ]


def test_process_tables_say_where_things_run() -> None:
    text = """
        bus.url = "nats://n:4222"
        tokenizer.count = 2
        scheduler = { count = 2, tensor_parallel = 2 }
        [[process]]
        host = "web"
        stages = ["detokenizer", "tokenizer", "frontend"]
        [[process]]
        host = "gpu-1"
        stages = ["scheduler:0"]
        [[process]]
        host = "gpu-2"
        stages = ["scheduler:1.0"]
        [[process]]
        host = "gpu-3"
        stages = ["scheduler:1.1"]
    """
    assert layout(text) == [
        ("web", "frontend:0+tokenizer:0+tokenizer:1+detokenizer:0"),
        ("gpu-1", "scheduler:0+scheduler:0.1"),
        ("gpu-2", "scheduler:1"),
        ("gpu-3", "scheduler:1.1"),
    ]


def test_every_stage_is_placed_once() -> None:
    topology = parse_topology("frontend.count = 2\nscheduler = { count = 3, tensor_parallel = 2 }")
    placed = [stage for process in place(topology, "here") for stage in process.stages]
    assert len(placed) == len(set(placed)) == 2 + 1 + 3 * 2 + 1


@pytest.mark.parametrize(
    ("stage", "text"), [(StageId("frontend", 1), "frontend:1"), (StageId("scheduler", 0, 1), "scheduler:0.1")]
)
def test_a_stage_has_a_short_name(stage: StageId, text: str) -> None:
    assert str(stage) == text


def test_hosts_agree_on_the_hash_whatever_their_own_addresses_are() -> None:
    here = topology_hash(Topology())
    assert topology_hash(parse_topology("frontend.listen = '0.0.0.0:9'\nbus.url = 'nats://a:1'")) == here
    assert topology_hash(parse_topology("model.source = '/somewhere/else'")) == here
    assert topology_hash(parse_topology("frontend.count = 2")) != here
    assert topology_hash(parse_topology("scheduler.page_tokens = 8")) != here
    assert topology_hash(parse_topology("cluster = 'other'")) != here
