"""Token ids as bytes, aborts as text, errors as answers."""

from __future__ import annotations

import numpy as np
import pytest

from busllm.errors import ContextLengthExceeded, MalformedMessage, QueueFull, RemoteError
from busllm.messages.codec import pack_ids, unpack_ids
from busllm.messages.control import error_answer, raise_if_error
from busllm.messages.to_everyone import decode_abort, encode_abort
from busllm.messages.to_frontend import decoder as from_stages
from busllm.messages.to_frontend import failed, remote_error


def test_token_ids_travel_as_int32_little_endian() -> None:
    assert pack_ids([1, 258, -1]) == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"
    assert unpack_ids(pack_ids([1, 258, -1])).tolist() == [1, 258, -1]
    assert pack_ids(np.array([3], dtype=np.int64)) == pack_ids([3])
    assert unpack_ids(b"").tolist() == []


def test_half_a_token_id_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="multiple of 4"):
        unpack_ids(b"\0\0\0\0\0")


def test_an_abort_is_empty_or_an_attempt() -> None:
    assert (encode_abort(), encode_abort(3)) == (b"", b"3")
    assert decode_abort(b"") is None
    assert decode_abort(b"\n") is None  # what `echo | nats pub` sends
    assert decode_abort(b"12\n") == 12


@pytest.mark.parametrize("payload", [b"-1", b"1.5", b"all", b"1 2", b"9" * 11, b"\xff", "٣".encode(), "²".encode()])
def test_any_other_abort_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_abort(payload)


def test_an_error_survives_the_way_to_its_client() -> None:
    error = ContextLengthExceeded(9000, 8192, "prompt")
    with pytest.raises(RemoteError) as answered:
        raise_if_error(error_answer(error))
    travelled = remote_error(failed("u" * 20, 1, "tokenizer", error))
    for remote in (answered.value, travelled):
        assert (remote.code, remote.status, remote.type, remote.param, remote.message) == (
            error.code,
            error.status,
            error.type,
            error.param,
            error.message,
        )


def test_whether_to_try_again_travels_with_the_error() -> None:
    assert remote_error(failed("u" * 20, 1, "scheduler", QueueFull(3, 2))).retryable == QueueFull(3, 2).retryable


def test_an_answer_that_is_no_error_passes() -> None:
    raise_if_error(b'{"token_ids":[1]}')
    raise_if_error(b"")


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        from_stages.decode(b"\x91" * 100_000)
