"""The broker: one process that all connections of a host meet in.

Owns: the socket, and one `BrokerClient` per connection. Routing is `MemoryBus`'s: what is true of the memory bus in one
process is true here across several.
Does not know: what is published.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
from busllm_bus_unix.frames import (
    Deliver,
    FrameReader,
    FromClient,
    Hello,
    Ping,
    Pong,
    Publish,
    Refused,
    Subscribe,
    Unsubscribe,
    encode,
)

from busllm.bus.memory import DEFAULT_MAX_PAYLOAD_BYTES, MemoryBus, MemoryConnection
from busllm.bus.protocol import Message
from busllm.bus.queue import QueueBounds
from busllm.errors import BusError

MAX_WAITING_BYTES = 64 * 2**20  # for one client that does not read


class BrokerClient(MemoryConnection):
    """One client, as the broker's memory bus sees it: what is delivered to it goes out at once.

    Args:
        broker: whose client it is.
        transport: to the client.
    """

    def __init__(self, broker: Broker, transport: asyncio.WriteTransport) -> None:
        self._number = broker.next_client()
        super().__init__(broker.bus, f"broker.client-{self._number}", QueueBounds())
        self._broker = broker
        self._transport = transport
        self._subscribed: dict[int, int] = {}  # the bus's number → the client's own

    def send_frame(self, frame: Hello | Deliver | Pong | Refused) -> None:
        """Sends a frame; a client that lets too much wait is dropped."""
        if self._transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            self._transport.abort()
        elif not self._transport.is_closing():
            self._transport.write(encode(frame))

    def deliver(self, message: Message) -> None:
        """Sends a message on."""
        number = self._subscribed.get(message.subscription)
        if number is not None:
            self.send_frame(Deliver(number, message.subject, message.payload, message.reply, message.no_responders))

    def handle(self, frame: FromClient) -> None:
        """Does what the client asks for.

        Raises:
            BusError: the client breaks the rules that its own side checks.
        """
        match frame:
            case Publish(subject=subject) if self._broker.is_refused(subject):
                self.send_frame(Refused(None, f"publishing to {subject!r} is not permitted"))
            case Publish(subject=subject, payload=payload, reply=reply):
                self.publish(subject, payload, reply)
            case Subscribe(number=number, pattern=pattern) if self._broker.is_refused(pattern):
                self.send_frame(Refused(number, f"subscribing to {pattern!r} is not permitted"))
            case Subscribe(number=number, pattern=pattern, queue_group=queue_group):
                subscription = self.subscribe_now(pattern, queue_group)
                self._subscribed[subscription.number] = number
            case Unsubscribe(number=number):
                for own, theirs in list(self._subscribed.items()):
                    if theirs == number:
                        del self._subscribed[own]
                        self.unsubscribe_now(own)
            case Ping():
                self.send_frame(Pong())


class ClientProtocol(asyncio.Protocol):
    """The socket of one client.

    Args:
        broker: whose client it is.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._reader = FrameReader(msgspec.msgpack.Decoder(FromClient))
        self._client: BrokerClient | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._client = BrokerClient(self._broker, transport)
        self._client.send_frame(Hello(self._broker.bus.max_payload_bytes))

    def data_received(self, data: bytes) -> None:
        """A client that breaks the rules is dropped: its own side keeps them."""
        assert self._client is not None and self._transport is not None
        try:
            for frame in self._reader.feed(data):
                self._client.handle(frame)
        except (BusError, msgspec.DecodeError):
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """A client has gone; so have its subscriptions."""
        if self._client is not None:
            self._client.close_now()


class Broker:
    """The meeting point. Inert until `serve`.

    Args:
        max_payload_bytes: the largest message.
        refused: first tokens of subjects that may be neither published nor subscribed to.
    """

    def __init__(self, *, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES, refused: Sequence[str] = ()) -> None:
        self.bus = MemoryBus(max_payload_bytes=max_payload_bytes)
        self._refused = frozenset(refused)
        self._num_clients = 0

    def next_client(self) -> int:
        """A number for a new client."""
        self._num_clients += 1
        return self._num_clients

    def is_refused(self, subject: str) -> bool:
        """Whether a subject or pattern is not permitted."""
        return subject.split(".", 1)[0] in self._refused

    async def serve(self, path: Path) -> None:
        """Serves on a socket of mode 0600 until cancelled; one that a killed broker left behind is replaced.

        Raises:
            BusError: another broker serves there.
        """
        _make_free(path)
        old_mask = os.umask(0o177)
        try:
            server = await asyncio.get_running_loop().create_unix_server(lambda: ClientProtocol(self), str(path))
        finally:
            os.umask(old_mask)
        async with server:
            await server.serve_forever()


def _make_free(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)  # nobody answers
            return
    raise BusError(f"another broker serves {path}.")


async def _run(broker: Broker, path: Path) -> None:
    serving = asyncio.create_task(broker.serve(path))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()  # the reason, if it failed


def main() -> None:
    """The command `busllm-unix-broker`."""
    parser = argparse.ArgumentParser(description="Broker of busllm's unix bus: stages of one host meet at its socket.")
    parser.add_argument("socket", type=Path, help="path of the socket")
    parser.add_argument("--max-payload-bytes", type=int, default=DEFAULT_MAX_PAYLOAD_BYTES)
    parser.add_argument("--refuse", action="append", default=[], metavar="TOKEN", help="refuse subjects that begin so")
    arguments = parser.parse_args()
    broker = Broker(max_payload_bytes=arguments.max_payload_bytes, refused=arguments.refuse)
    asyncio.run(_run(broker, arguments.socket))


if __name__ == "__main__":
    main()
