"""A child of `busllm up` that is no stage: it announces itself, answers HTTP, and ends as it is told.

    python fake_stage.py NAME BEHAVIOUR CLUSTER

BEHAVIOUR: `steady`, `slow-drain` (takes a moment to end after SIGTERM), `deaf` (ignores SIGTERM), or `exit-N`.
Tells on stdout: `started NAME PID`, `stopping NAME`, `ended NAME`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

import anyio

from busllm.bus.connect import BusOptions, open_bus
from busllm.bus.subjects import Subjects
from busllm.errors import BusError
from busllm.ids import new_instance
from busllm.messages.codec import encode_json
from busllm.messages.control import Announcement, StageState
from busllm.topology.child import BUS_URL_VARIABLE, LISTEN_FDS_VARIABLE
from busllm.topology.last_words import say_last_words

HEARTBEAT_S = 0.1
SLOW_DRAIN_S = 0.5
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write, so that lines of several processes stay whole


def answer_http(listener: socket.socket) -> None:
    listener.setblocking(True)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(ANSWER)


async def announce(url: str, cluster: str, name: str) -> None:
    subjects = Subjects(cluster)
    kind, index = name.split(":")
    instance = new_instance(kind, int(index))
    connection = await open_bus("nats", BusOptions(url=url)).connect(name=instance, inbox=subjects.inbox(instance))
    announcement = Announcement(
        kind=kind,
        index=int(index),
        instance=instance,
        host=socket.gethostname(),
        pid=os.getpid(),
        state=StageState.READY,
    )
    while True:
        try:
            connection.publish(subjects.stage(kind, instance), encode_json(announcement))
        except BusError as error:
            say("unheard", name, error.code)
        await anyio.sleep(HEARTBEAT_S)


async def main(name: str, behaviour: str, cluster: str) -> None:
    for listener in {int(fd) for fd in json.loads(os.environ[LISTEN_FDS_VARIABLE]).values()}:
        threading.Thread(target=answer_http, args=(socket.socket(fileno=listener),), daemon=True).start()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        say("started", name, os.getpid())
        async with anyio.create_task_group() as tasks:
            if BUS_URL_VARIABLE in os.environ:
                for stage in name.split("+"):
                    tasks.start_soon(announce, os.environ[BUS_URL_VARIABLE], cluster, stage)
            async for _ in signals:
                say("stopping", name)
                if behaviour != "deaf":
                    tasks.cancel_scope.cancel()
    if behaviour == "slow-drain":
        await anyio.sleep(SLOW_DRAIN_S)
    say("ended", name)


if __name__ == "__main__":
    name, behaviour, cluster = sys.argv[1:]
    if behaviour.startswith("exit-"):
        say("started", name, os.getpid())
        say_last_words(f"the {name}\nis tired")
        sys.exit(int(behaviour.removeprefix("exit-")))
    anyio.run(main, name, behaviour, cluster)
