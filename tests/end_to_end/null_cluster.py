"""Clusters around the null engine, every stage in its own process, and streams whose texts are known beforehand."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import nats
from openai import APIError, AsyncOpenAI

from busllm.messages.control import Announcement, StageState, announcement_decoder
from tests.end_to_end.cluster import Cluster
from tests.end_to_end.processes import eventually
from tests.requests.test_sending_on import undisturbed

NUM_TOKENS = 400
STEP_TIME_S = 0.005
KINDS = ("frontend", "tokenizer", "scheduler", "detokenizer")
PROMPTS = [f"prompt number {number}" for number in range(8)]


def null_topology(counts: dict[str, int] | None = None, more: str = "", frontend: str = "") -> str:
    """A topology file with every stage in a process of its own."""
    counts = dict.fromkeys(KINDS, 1) | (counts or {})
    text = f"model.source = 'null'\nmodel.null.step_time_s = {STEP_TIME_S}\n{more}"
    for kind, count in counts.items():
        text += f"[{kind}]\ncount = {count}\n"
        if kind == "frontend":
            text += frontend + ("" if "listen" in frontend else "listen = '127.0.0.1:0'\n")
    for kind, count in counts.items():
        for index in range(count):
            text += f"[[process]]\nstages = ['{kind}:{index}']\n"
    return text


async def announced(cluster: Cluster) -> dict[str, Announcement]:
    """Every instance that answers within a second, by stage name (`tokenizer:0`)."""
    assert cluster.bus_url is not None
    found: dict[str, Announcement] = {}
    connection = await nats.connect(cluster.bus_url)

    async def hear(message: nats.aio.msg.Msg) -> None:
        announcement = announcement_decoder.decode(message.data)
        if announcement.state is not StageState.GONE:
            found[f"{announcement.kind}:{announcement.index}"] = announcement

    await connection.subscribe("busllm.local.stage.>", cb=hear)
    await connection.publish("busllm.local.discover", b"")
    await connection.flush()
    with anyio.move_on_after(0.3):
        await anyio.sleep_forever()  # there is no telling who will answer
    await connection.close()
    return found


async def send_signal(cluster: Cluster, stage: str, number: signal.Signals) -> int:
    """Sends a signal to the process of a stage; returns its pid."""
    pid = (await announced(cluster))[stage].pid
    os.kill(pid, number)
    return pid


class Streams:
    """Eight streams read side by side.

    Attributes:
        texts: what each prompt was answered so far.
        errors: how those ended that did not finish.
    """

    def __init__(self, client: AsyncOpenAI, num_tokens: int = NUM_TOKENS) -> None:
        self._client = client
        self._num_tokens = num_tokens
        self.texts = dict.fromkeys(PROMPTS, "")
        self.errors: dict[str, APIError] = {}
        self.finished: set[str] = set()

    async def read(self, prompt: str) -> None:
        """Reads one to its end."""
        try:
            stream = await self._client.completions.create(
                model="null", prompt=prompt, max_tokens=self._num_tokens, seed=7, stream=True
            )
            async for chunk in stream:
                self.texts[prompt] += chunk.choices[0].text
                if chunk.choices[0].finish_reason:
                    self.finished.add(prompt)
        except APIError as error:
            self.errors[prompt] = error

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Starts all of them."""
        for prompt in PROMPTS:
            tasks.start_soon(self.read, prompt)

    async def all_in_mid_stream(self) -> None:
        """Waits until each has said something, and sees that none has ended."""

        async def begun() -> bool:
            assert not self.errors
            return all(len(text) > 10 for text in self.texts.values())

        await eventually(begun, "all streams have begun")
        assert not self.finished

    def check_undisturbed(self) -> None:
        """Each text is exactly the null model's answer."""
        assert not self.errors
        assert self.texts == {prompt: undisturbed(prompt, self._num_tokens) for prompt in PROMPTS}


def null_cluster(directory: Path, topology: str) -> Cluster:
    """Starts `busllm up` and waits until it serves."""
    cluster = Cluster(directory, topology)
    try:
        cluster.start("up")
        cluster.wait_until_ready()
    except BaseException:
        cluster.kill()
        raise
    return cluster
