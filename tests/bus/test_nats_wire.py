"""The private names of nats-py that the NATS bus stands on."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
from nats.aio.client import Client

from busllm.bus.nats_wire import WireClient, WireTransport

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("method", ["_process_msg", "_process_pong"])
def test_nats_py_still_has_the_methods_that_are_overridden(method: str) -> None:
    ours, theirs = getattr(WireClient, method), getattr(Client, method)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), version("nats-py")


def test_nats_py_still_keeps_its_transport_where_ours_is_put() -> None:
    assert "_transport" in vars(Client())


async def test_nats_pys_parser_hands_messages_and_pongs_to_the_overridden_methods() -> None:
    seen: list[tuple[object, ...]] = []
    client = WireClient(WireTransport(must_encrypt=False), lambda *message: seen.append(message))
    client.expect_pong(lambda: seen.append(("pong",)))
    await client._ps.parse(
        b"MSG a.b 7 2\r\nhi\r\nMSG c 8 reply 0\r\n\r\nPONG\r\nHMSG inbox.1 0 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    )
    assert seen == [
        (7, "a.b", b"hi", None, False),
        (8, "c", b"", "reply", False),
        ("pong",),
        (0, "inbox.1", b"", None, True),
    ]
