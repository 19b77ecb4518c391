"""Questions that meet an error inside a stage are answered, and the stage goes on under its name."""

from __future__ import annotations

import pytest

from busllm.errors import RemoteError
from busllm.messages.codec import encode_json
from busllm.messages.control import raise_if_error
from busllm.model_store.description import NULL_MAX_CONTEXT_TOKENS, NULL_VOCAB_SIZE
from busllm.stages.tokenizer import TokenizerStage
from busllm.text.null_tokenizer import NullTokenizer
from tests.stages.wire import SUBJECTS, running

pytestmark = pytest.mark.anyio

CLASHING = {"messages": [], "template_options": {"messages": []}}


async def test_template_options_that_clash_are_answered_with_an_error() -> None:
    async with running(TokenizerStage(NullTokenizer, NULL_MAX_CONTEXT_TOKENS, NULL_VOCAB_SIZE)) as wire:
        subject = SUBJECTS.control(wire.actor.instance, "tokenize")
        with pytest.raises(RemoteError) as answered:
            raise_if_error(await wire.connection.request(subject, encode_json(CLASHING), timeout_s=5.0))
        assert answered.value.status in (400, 500)
        assert await wire.ask("tokenize", {"prompt": "hi"}) == {"token_ids": [104, 105]}
