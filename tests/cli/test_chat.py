"""`busllm chat` against the real frontend and the null engine."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import AsyncIterator
from functools import partial

import anyio
import anyio.to_thread
import pytest

from busllm.bus.memory import MemoryBus
from busllm.cli.chat import Chat
from busllm.cli.http_target import HttpFailure, HttpTarget, error_text, find_http_target, served_model
from busllm.cli.main import main
from busllm.testing.frontend_server import MODEL, fake_settings, serving
from busllm.testing.stack import Stack, StackConfig, running_stack

pytestmark = pytest.mark.anyio

PATIENCE_S = 40.0
Served = tuple[Stack, HttpTarget]

# The command line in a process whose terminal is its own, so that Ctrl-C there interrupts it.
IN_A_TERMINAL = """
import fcntl, sys, termios
from busllm.cli.main import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The whole path with HTTP in front of it."""
    with anyio.fail_after(PATIENCE_S):
        async with (
            running_stack(MemoryBus(), StackConfig(step_time_s=0.002)) as stack,
            serving(stack.owner, fake_settings(api_keys=frozenset({"secret"}), max_model_len=50_000)) as server,
        ):
            yield stack, HttpTarget(server.url, "secret")


def in_thread(function: object, *args: object) -> object:
    """The command is synchronous; the server it talks to runs in this loop."""
    return anyio.to_thread.run_sync(partial(function, *args))  # type: ignore[arg-type]


async def test_an_answer_becomes_part_of_the_conversation_and_reset_forgets_it(served: Served) -> None:
    chat = Chat(served[1], {"model": MODEL, "max_tokens": 12, "temperature": 0}, "Be brief.")
    said = "".join(await in_thread(lambda: list(chat.say("hello"))))  # type: ignore[misc]
    assert len(said) == 12
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == said
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


async def test_closing_an_answer_ends_the_request_and_keeps_what_was_said(served: Served) -> None:
    stack, target = served
    chat = Chat(target, {"model": MODEL, "max_tokens": 40_000}, None)

    def read_a_little() -> str:
        texts = chat.say("endless")
        first = next(texts)
        assert stack.owner.num_open == 1
        texts.close()
        return first

    first = await in_thread(read_a_little)
    await stack.wait_for(lambda: stack.owner.num_open == 0)
    assert chat.messages[-1] == {"role": "assistant", "content": first}


async def test_a_refused_message_tells_why_and_is_forgotten(served: Served) -> None:
    chat = Chat(served[1], {"model": MODEL, "max_tokens": -1}, None)
    with pytest.raises(HttpFailure, match="400 invalid_value max_tokens"):
        await in_thread(lambda: list(chat.say("hello")))
    assert chat.messages == []


async def test_the_model_is_the_one_that_is_served_and_a_wrong_key_is_told(served: Served) -> None:
    assert await in_thread(served_model, served[1]) == MODEL
    with pytest.raises(HttpFailure, match="401"):
        await in_thread(served_model, HttpTarget(served[1].url, None))


async def test_a_stream_that_breaks_off_is_a_failure() -> None:
    async def break_off(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            received = b""
            while b"hello" not in received:  # a close with something unread would be a reset
                received += await stream.receive()
            await stream.send(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"delta": {"content": "half"}}]}\n\n')

    with anyio.fail_after(PATIENCE_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, break_off)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            chat = Chat(HttpTarget(f"http://127.0.0.1:{port}", None), {}, None)
            with pytest.raises(HttpFailure, match="broke off"):
                await in_thread(lambda: list(chat.say("hello")))
            tasks.cancel_scope.cancel()
    assert chat.messages[-1]["content"] == "half"


async def test_each_line_of_a_pipe_is_a_message(served: Served) -> None:
    _, target = served
    command = [sys.executable, "-m", "busllm.cli.main", "chat", "--url", target.url, "--max-tokens", "10"]
    done = await anyio.run_process(
        command, input=b"one\n\n/reset\ntwo\n", env=os.environ | {"BUSLLM_API_KEY": "secret"}, check=False
    )
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, [len(line) for line in lines]) == (0, [10, 10])


async def test_ctrl_c_ends_the_answer_and_not_the_chat(served: Served) -> None:
    stack, target = served
    ours, theirs = pty.openpty()
    process = await anyio.open_process(
        [sys.executable, "-c", IN_A_TERMINAL, "chat", "--url", target.url, "--max-tokens", "40000"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"BUSLLM_API_KEY": "secret", "TERM": "dumb"},
    )
    os.close(theirs)
    screen = Screen(ours)
    async with process:
        await screen.wait_for("> ")
        os.write(ours, b"hello\n")
        await stack.wait_for(lambda: stack.owner.num_open == 1)
        os.write(ours, b"\x03")
        await screen.wait_for(" ^C")
        await stack.wait_for(lambda: stack.owner.num_open == 0)
        os.write(ours, b"/exit\n")
        await screen.read_to_end()
        assert await process.wait() == 0


class Screen:
    """What a program writes to its terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._seen = ""

    async def wait_for(self, text: str) -> None:
        """Reads until a text has come that was not there before."""
        while text not in self._seen:
            await self._read()
        self._seen = self._seen.partition(text)[2]

    async def read_to_end(self) -> None:
        """Reads until the program has closed its terminal."""
        try:
            while True:
                await self._read()
        except OSError:
            os.close(self._terminal)

    async def _read(self) -> None:
        await anyio.wait_readable(self._terminal)
        self._seen += os.read(self._terminal, 65536).decode(errors="replace")


def test_a_url_that_is_none_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "localhost:8000"]) == 2
    assert "http://host:8000" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_the_base_url_may_have_the_ending_that_openai_clients_want(url: str) -> None:
    import argparse

    assert find_http_target(argparse.Namespace(url=url, cluster=None)).url == "http://host:1"


def test_an_answer_that_is_no_json_is_shown_in_part() -> None:
    assert error_text(502, b"<html>\nBad   gateway</html>") == "502 <html> Bad gateway</html>"
