"""Structured answers over the bus: refused before scheduling, kept to across the death of a stage."""

from __future__ import annotations

import re

import anyio
import pytest

from busllm.errors import BusllmError
from busllm.sampling import Grammar, GrammarKind
from busllm.testing.stack import StackConfig, request
from tests.requests.conftest import World

pytestmark = pytest.mark.anyio

PATIENCE_S = 30.0
NUMBERS = Grammar(GrammarKind.REGEX, r"[0-9]{3}(-[0-9]{3}){40}")
BROKEN = Grammar(GrammarKind.REGEX, "[0-9", "structured_outputs.regex")


@pytest.mark.parametrize("fault", ["tokenizer:0", "scheduler:0", "detokenizer:0"])
async def test_an_answer_that_is_sent_on_goes_on_under_its_grammar(world: World, fault: str) -> None:
    asked = request("numbers", n=3, max_tokens=400, grammar=NUMBERS)
    texts: dict[bool, dict[int, str]] = {}
    with anyio.fail_after(PATIENCE_S):
        async with world.stack(StackConfig(step_time_s=0.003)) as stack:
            for is_disturbed in (False, True):
                text = texts[is_disturbed] = dict.fromkeys(range(3), "")
                was_killed = False
                async for deltas in stack.owner.submit(asked):
                    for delta in deltas:
                        text[delta.choice] += delta.text
                    if is_disturbed and not was_killed and all(len(part) > 30 for part in text.values()):
                        was_killed = True
                        await stack.kill(fault)
                        await stack.start(fault)
                assert was_killed == is_disturbed
    assert texts[True] == texts[False]
    assert all(re.fullmatch(NUMBERS.text, text) for text in texts[True].values())
    assert len(set(texts[True].values())) == 3


async def test_a_grammar_that_does_not_compile_is_refused_by_the_tokenizer(world: World) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with world.stack() as stack:
            with pytest.raises(BusllmError) as caught:
                await stack.generate("hello", grammar=BROKEN)
            assert (caught.value.status, caught.value.param) == (400, "structured_outputs.regex")
            assert stack.actors["scheduler:0"].announcement().statistics["steps"] == 0
            assert await stack.generate("hello", max_tokens=5)
