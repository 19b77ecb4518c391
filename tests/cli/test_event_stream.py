"""Server-sent events out of bytes, in whatever pieces they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busllm.cli.event_stream import EventStream, chunk_decoder

EVENTS = (
    'data: {"a": 1}\n\n: ping\n\ndata: line \u2028 \x85 separators\n\n'
    "event: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n"
)
EXPECTED = ['{"a": 1}', "line \u2028 \x85 separators", "one\ntwo", "[DONE]"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_events_are_the_same_wherever_the_bytes_are_cut(line_end: str, cuts: list[int]) -> None:
    sent = EVENTS.replace("\n", line_end).encode()
    edges = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    stream = EventStream()
    found = [data for begin, end in pairwise(edges) for data in stream.feed(sent[begin:end])]
    assert [data.decode() for data in found] == EXPECTED


def test_an_event_without_its_blank_line_is_not_complete() -> None:
    stream = EventStream()
    assert stream.feed(b"data: half\n") == []
    assert stream.feed(b"\n") == [b"half"]


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        (b'{"choices": [{"text": "t"}]}', "t"),
        (b'{"choices": [{"delta": {"content": "c", "role": "assistant"}}], "usage": null}', "c"),
        (b'{"choices": [{"delta": {"content": null}, "finish_reason": "stop"}]}', ""),
    ],
)
def test_new_text_is_read_from_chats_and_completions_alike(chunk: bytes, text: str) -> None:
    assert chunk_decoder.decode(chunk).choices[0].new_text == text
