"""`busllm chat`: talk to a model in the terminal.

Owns: its flags, the conversation, what Ctrl-C does.
Does not know: which server it is (`http_target.py`), what an event looks like (`event_stream.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec

from busllm.cli.arguments import Once
from busllm.cli.event_stream import DONE, EventStream, chunk_decoder
from busllm.cli.http_target import (
    HttpFailure,
    HttpTarget,
    add_http_arguments,
    error_text,
    find_http_target,
    served_model,
)

PROMPT = "> "
# An answer cannot move the cursor or set colours: control characters but newline and tab are shown, not obeyed.
_HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C ends an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_http_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", action=Once, help="system message")
    parser.add_argument("--temperature", metavar="T", type=float, action=Once, help="0 = always the most likely token")
    parser.add_argument("--max-tokens", metavar="N", type=int, action=Once, help="longest answer")


def execute(arguments: argparse.Namespace) -> int:
    """Talks to a model: a line is a message, the answer is printed as it comes.

    /reset forgets the conversation, /exit or Ctrl-D ends it. Ctrl-C ends the answer, not the chat. Without a terminal
    each line of standard input is a message. An API key is taken from the environment variable BUSLLM_API_KEY.
    """
    target = find_http_target(arguments)
    settings = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    settings = {name: value for name, value in settings.items() if value is not None}
    model = arguments.model or served_model(target)
    chat = Chat(target, {"model": model, **settings}, arguments.system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  input() then edits lines and remembers them

        print(f"{model} at {target.url}. {_HELP}.", file=sys.stderr)
    return _converse(chat, is_terminal)


def _converse(chat: Chat, is_terminal: bool) -> int:
    num_failed = 0
    for line in _lines(PROMPT if is_terminal else ""):
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/reset":
                chat.reset()
            case word if word.startswith("/") and " " not in word:
                print(f"There is no {word}; {_HELP}.", file=sys.stderr)
            case message:
                num_failed += not _answer(chat, message)
    return 0 if is_terminal or not num_failed else 1


def _lines(prompt: str) -> Iterator[str]:
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print("\n(/exit or Ctrl-D ends the chat)", file=sys.stderr)


def _answer(chat: Chat, message: str) -> bool:
    """Prints one answer; False when it failed."""
    try:
        with contextlib.closing(chat.say(message)) as texts:
            for text in texts:
                sys.stdout.write(text.translate(_HARMLESS) if sys.stdout.isatty() else text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" ^C")
    except HttpFailure as error:
        print(f"busllm chat: {error}", file=sys.stderr)
        return False
    print(flush=True)
    return True


class Chat:
    """A conversation with one server.

    Args:
        fields: of every request besides the messages.
        system: first message of every conversation.
    """

    def __init__(self, target: HttpTarget, fields: dict[str, Any], system: str | None) -> None:
        self._target = target
        self._fields = fields
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def say(self, message: str) -> Generator[str, None, None]:
        """Sends a message and yields the answer as it comes.

        Closing the iterator, or an exception such as KeyboardInterrupt in it, closes the stream, which ends the
        request at the server; what was said until then stays in the conversation. A message without an answer is
        forgotten.

        Raises:
            HttpFailure: the server answers with an error or breaks off.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        said: list[str] = []
        try:
            for text in self._stream(asked):
                said.append(text)
                yield text
        finally:
            if said:
                self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {**self._fields, "messages": messages, "stream": True}
        try:
            with (
                self._target.client(timeout_s=None) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise HttpFailure(error_text(response.status_code, response.read()))
                yield from _texts(response.iter_bytes())
        except httpx.HTTPError as error:
            raise HttpFailure(f"{self._target.url}: {error}") from error


def _texts(pieces: Iterator[bytes]) -> Iterator[str]:
    events = EventStream()
    for piece in pieces:
        for data in events.feed(piece):
            if data == DONE:
                return
            try:
                chunk = chunk_decoder.decode(data)
            except msgspec.DecodeError as error:
                raise HttpFailure(f"The server sent what is no chunk of a chat: {error}.") from error
            if chunk.error is not None:
                raise HttpFailure(error_text(None, data))
            yield from (choice.new_text for choice in chunk.choices if choice.new_text)
    raise HttpFailure("The answer broke off.")
