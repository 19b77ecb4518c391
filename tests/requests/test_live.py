"""One request as its reader sees it: merged while unread, ended once."""

from __future__ import annotations

import anyio
import pytest

from busllm.errors import Aborted, Lost
from busllm.messages.to_frontend import TokenText, Usage
from busllm.messages.to_tokenizer import TextPrompt
from busllm.requests.generation import GenerationRequest
from busllm.requests.live import LiveRequest
from busllm.sampling import SamplingParams
from busllm.testing.clock import settle

pytestmark = pytest.mark.anyio

USAGE = Usage(3, 0, 2)


def live(n: int = 1) -> LiveRequest:
    return LiveRequest("u", GenerationRequest((TextPrompt("x"),), SamplingParams(), n=n), 7, 0.0)


def give(request: LiveRequest, text: str, choice: int = 0) -> None:
    ids = [ord(character) for character in text]
    request.choices[choice].add(text, ids, tuple(TokenText(chr(one).encode(), -1.0) for one in ids))
    request.deliver(request.choices[choice])


async def test_what_comes_faster_than_it_is_read_is_one_delta() -> None:
    request = live()
    for text in ("a", "bc", "", "d"):
        give(request, text)
    (delta,) = await anext(request)
    assert (delta.text, delta.token_ids) == ("abcd", (97, 98, 99, 100))
    assert [one.token for one in delta.logprobs] == [b"a", b"b", b"c", b"d"]
    give(request, "e")
    assert [delta.text for delta in await anext(request)] == ["e"]


async def test_each_choice_has_a_delta_of_its_own() -> None:
    request = live(n=3)
    give(request, "x", 2)
    give(request, "y", 0)
    give(request, "z", 2)
    assert [(delta.choice, delta.text) for delta in await anext(request)] == [(2, "xz"), (0, "y")]


async def test_a_reader_is_woken_by_output_that_comes_later() -> None:
    request, read = live(), []

    async def reader() -> None:
        async for deltas in request:
            read.extend(delta.text for delta in deltas)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        for text in ("a", "b", "c"):
            await settle()
            give(request, text)
        await settle()
        request.finish(request.choices[0], "length", USAGE)
    assert read == ["a", "b", "c", ""]


async def test_the_last_delta_of_a_choice_has_reason_and_usage() -> None:
    request = live(n=2)
    give(request, "a", 0)
    request.finish(request.choices[0], "stop", USAGE)
    (delta,) = await anext(request)
    assert (delta.text, delta.finish_reason, delta.usage) == ("a", "stop", USAGE)
    assert not request.is_done
    request.finish(request.choices[1], "length", USAGE)
    assert request.is_done
    assert [delta.choice for delta in await anext(request)] == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(request)


async def test_what_was_unread_comes_before_the_error_and_the_error_once() -> None:
    request = live()
    give(request, "a")
    request.fail(Lost("gone"))
    request.fail(Aborted("too late"))
    assert [delta.text for delta in await anext(request)] == ["a"]
    with pytest.raises(Lost):
        await anext(request)
    with pytest.raises(StopAsyncIteration):
        await anext(request)


async def test_a_finished_request_does_not_fail_any_more() -> None:
    request = live()
    request.finish(request.choices[0], "stop", USAGE)
    request.fail(Aborted("too late"))
    assert [delta.finish_reason for delta in await anext(request)] == ["stop"]
    with pytest.raises(StopAsyncIteration):
        await anext(request)


def test_the_record_for_sending_on_grows_with_what_was_given() -> None:
    request = live()
    give(request, "ab")
    request.choices[0].take()
    give(request, "é")
    assert (request.choices[0].output_ids, request.choices[0].delivered_chars) == ([97, 98, 233], 3)
