"""Where ranks meet, what they are called, and mistakes that would keep them apart."""

from __future__ import annotations

import socket

import pytest

from busllm.errors import ConfigError
from busllm.topology.config import Topology
from busllm.topology.placement import StageId, all_stages, place
from busllm.topology.ranks import announced_place, device_number, meeting_address, num_ranks_beside
from busllm.topology.read import parse_topology

TWO_REPLICAS = "scheduler = { count = 2, tensor_parallel = 2 }\n"
TWO_HOSTS = """
bus.url = "nats://127.0.0.1:4222"
process = [
    { host = "a", stages = ["frontend", "tokenizer", "detokenizer", "scheduler:0.0"] },
    { host = "b", stages = ["scheduler:0.1"] },
]
"""
SPLIT = "scheduler.tensor_parallel = 2\n"


def schedulers(topology: Topology) -> list[StageId]:
    return [stage for stage in all_stages(topology) if stage.kind == "scheduler"]


def test_no_two_stages_announce_the_same_place() -> None:
    topology = parse_topology(TWO_REPLICAS)
    places = [announced_place(topology, stage) for stage in all_stages(topology)]
    assert len(set(places)) == len(places)
    assert [announced_place(topology, stage) for stage in schedulers(topology)] == [
        ("scheduler", 0),
        ("rank", 1),
        ("scheduler", 1),
        ("rank", 3),
    ]


def test_ranks_of_one_host_take_devices_in_turn() -> None:
    topology = parse_topology(TWO_REPLICAS)
    assert [device_number(topology, stage) for stage in schedulers(topology)] == [0, 1, 2, 3]
    assert {num_ranks_beside(topology, stage) for stage in schedulers(topology)} == {2}


def test_ranks_of_two_hosts_each_take_the_first_device() -> None:
    topology = parse_topology(SPLIT + TWO_HOSTS)
    assert [device_number(topology, stage) for stage in schedulers(topology)] == [0, 0]
    assert {num_ranks_beside(topology, stage) for stage in schedulers(topology)} == {1}


def test_ranks_of_one_host_meet_where_no_other_host_can_come() -> None:
    address = meeting_address(parse_topology(SPLIT), 0, "nats://127.0.0.1:4222")
    assert (str(address.listen), address.host) == ("127.0.0.1:0", "127.0.0.1")


def test_ranks_of_two_hosts_meet_at_the_address_that_reaches_the_bus() -> None:
    address = meeting_address(parse_topology(SPLIT + TWO_HOSTS), 0, "nats://secret@127.0.0.1:4222")
    assert address.host == "127.0.0.1"


def test_a_wildcard_is_announced_as_an_address_that_others_can_use() -> None:
    text = SPLIT + "scheduler.collective_listen = '0.0.0.0:29500'\n"
    address = meeting_address(parse_topology(text), 0, f"nats://{socket.gethostname()}:4222")
    assert str(address.listen) == "0.0.0.0:29500"
    assert address.host not in ("0.0.0.0", "")


def test_a_process_knows_of_which_replicas_it_holds_a_rank() -> None:
    assert [placed.replicas for placed in place(parse_topology(TWO_REPLICAS), "here")] == [
        frozenset(),
        frozenset({0}),
        frozenset({0}),
        frozenset({1}),
        frozenset({1}),
    ]


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("scheduler.collective_listen = '127.0.0.1:1'", "collective_listen", "only with scheduler.tensor_parallel"),
        (SPLIT + "scheduler.collective_listen = '127.0.0.1:0'" + TWO_HOSTS, "collective_listen", "do not reach"),
        (TWO_REPLICAS + "scheduler.collective_listen = '127.0.0.1:1'", "collective_listen", "several replicas"),
        (SPLIT + "scheduler.attention = 'cpu'", "attention", "one rank"),
    ],
)
def test_ranks_that_could_not_work_together_are_refused(text: str, key: str, words: str) -> None:
    text = text.replace(TWO_REPLICAS, "scheduler.count = 2\nscheduler.tensor_parallel = 2\n")
    with pytest.raises(ConfigError, match=words) as caught:
        parse_topology(text)
    assert caught.value.key == f"scheduler.{key}"
