"""One request as its reader sees it: in order, merged when long unread, ended once."""

from __future__ import annotations

import anyio
import pytest

from busllm.errors import Aborted, Lost
from busllm.messages.to_frontend import TokenText, Usage
from busllm.messages.to_tokenizer import TextPrompt
from busllm.requests.generation import ChoiceDelta, GenerationRequest
from busllm.requests.live import MAX_UNREAD_DELTAS, LiveRequest
from busllm.sampling import SamplingParams
from busllm.testing.clock import settle

pytestmark = pytest.mark.anyio

USAGE = Usage(3, 0, 2)


def live(n: int = 1) -> LiveRequest:
    return LiveRequest("u", GenerationRequest((TextPrompt("x"),), SamplingParams(), n=n), 7, 0.0)


def give(request: LiveRequest, text: str, choice: int = 0, reason: str | None = None) -> None:
    ids = tuple(ord(character) for character in text)
    logprobs = tuple(TokenText(chr(one).encode(), -1.0) for one in ids)
    usage = None if reason is None else USAGE
    request.give(ChoiceDelta(choice, text, ids, logprobs, None, reason, usage))


async def test_what_comes_while_nobody_reads_is_given_at_once_and_in_order() -> None:
    request = live(n=3)
    give(request, "x", 2)
    give(request, "yy", 0)
    give(request, "z", 2)
    assert [(delta.choice, delta.text) for delta in await anext(request)] == [(2, "x"), (0, "yy"), (2, "z")]
    give(request, "e")
    assert [delta.text for delta in await anext(request)] == ["e"]


async def test_what_a_slow_reader_leaves_is_merged_to_a_delta_per_choice() -> None:
    request, texts = live(n=2), [chr(97 + number % 26) for number in range(3 * MAX_UNREAD_DELTAS)]
    for text in texts:
        give(request, text, 0)
        give(request, text.upper(), 1)
    give(request, "!", 1, "length")
    deltas = await anext(request)
    assert len(deltas) <= MAX_UNREAD_DELTAS + 2
    for choice, expected in ((0, "".join(texts)), (1, "".join(texts).upper() + "!")):
        own = [delta for delta in deltas if delta.choice == choice]
        assert "".join(delta.text for delta in own) == expected
        assert [one for delta in own for one in delta.token_ids] == [ord(letter) for letter in expected]
        assert b"".join(one.token for delta in own for one in delta.logprobs) == expected.encode()
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert deltas[-1].usage == USAGE


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
        give(request, "", reason="length")
    assert read == ["a", "b", "c", ""]


async def test_the_last_delta_of_a_choice_has_reason_and_usage() -> None:
    request = live(n=2)
    give(request, "a", 0, "stop")
    (delta,) = await anext(request)
    assert (delta.text, delta.finish_reason, delta.usage) == ("a", "stop", USAGE)
    assert not request.is_done
    give(request, "", 1, "length")
    assert request.is_done
    assert [delta.choice for delta in await anext(request)] == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(request)


async def test_a_reader_that_was_cancelled_while_it_waited_loses_nothing() -> None:
    request = live()
    for text in ("a", "b"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, request)
            await settle()
            tasks.cancel_scope.cancel()
        give(request, text)
        assert [delta.text for delta in await anext(request)] == [text]


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
    give(request, "", reason="stop")
    request.fail(Aborted("too late"))
    assert [delta.finish_reason for delta in await anext(request)] == ["stop"]
    with pytest.raises(StopAsyncIteration):
        await anext(request)


def test_the_record_for_sending_on_grows_with_what_was_given() -> None:
    request = live()
    give(request, "ab")
    give(request, "é")
    assert (request.choices[0].output_ids, request.choices[0].delivered_chars) == ([97, 98, 233], 3)
