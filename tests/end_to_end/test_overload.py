"""More requests than the cluster takes, through two of everything: each ends in bounded time, one way or the other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import httpx
import pytest

from busllm.testing.http_oracles import check_error
from tests.end_to_end.null_cluster import null_cluster, null_topology
from tests.end_to_end.processes import free_port

pytestmark = pytest.mark.anyio

NUM_REQUESTS = 40
BOUND_S = 30.0


async def test_a_refusal_finds_its_way_back_through_two_of_everything(tmp_path: Path) -> None:
    listen = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    topology = null_topology(
        {"frontend": 2, "tokenizer": 2, "detokenizer": 2},
        more="scheduler.max_running = 1\nscheduler.max_waiting = 1\n",
        frontend=f"listen = {listen}\n",
    ).replace("[scheduler]\ncount = 1\n", "")
    cluster = null_cluster(tmp_path, topology)
    statuses: Counter[int] = Counter()

    async def ask(number: int) -> None:
        body = {"model": "null", "prompt": f"number {number}", "max_tokens": 20, "stream": number % 3 == 0}
        async with httpx.AsyncClient(base_url=f"http://{listen[number % 2]}", timeout=BOUND_S) as http:
            answer = await http.post("/v1/completions", json=body)
        statuses[answer.status_code] += 1
        if answer.status_code != 200:
            check_error(answer.status_code, answer.headers, answer.content, code="queue_full")
            assert "retry-after" in answer.headers

    try:
        with anyio.fail_after(BOUND_S):
            async with anyio.create_task_group() as tasks:
                for number in range(NUM_REQUESTS):
                    tasks.start_soon(ask, number)
        assert set(statuses) == {200, 429}
        assert sum(statuses.values()) == NUM_REQUESTS
        await cluster.idle()
        assert cluster.stop() == [0]
    finally:
        cluster.kill()
