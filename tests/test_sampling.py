"""What people write as sampling parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from busllm.errors import InvalidRequest
from busllm.sampling import Grammar, GrammarKind, SamplingParams, check_sampling


def test_one_stop_string_is_one_stop_string_and_not_its_characters() -> None:
    assert SamplingParams(stop="Paris").stop == ("Paris",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={5: 1.5}).logit_bias == ((5, 1.5),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "words", "param"),
    [
        ({"temperature": "hot"}, "temperature has a wrong type: Expected `float`, got `str`.", "temperature"),
        ({"max_tokens": "5"}, "max_tokens has a wrong type: Expected `int | null`, got `str`.", "max_tokens"),
        ({"seed": 1.5}, "seed has a wrong type", "seed"),
        ({"temperature": object()}, "temperature has a wrong type", "temperature"),
        ({"logit_bias": ((1, object()),)}, "logit_bias[0][1] has a wrong type", "logit_bias"),
        ({"logit_bias": (5,)}, "logit_bias[0] has a wrong type", "logit_bias"),
        ({"ignore_eos": "yes"}, "ignore_eos has a wrong type", "ignore_eos"),
        ({"stop": [1]}, "stop[0] has a wrong type", "stop"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias[0][0] has a wrong type", "logit_bias"),
        ({"grammar": "a+"}, "grammar has a wrong type", "grammar"),
        ({"grammar": Grammar("regexx", "a+")}, "grammar.kind has a wrong type: Invalid enum value 'regexx'", "grammar"),  # type: ignore[arg-type]
        ({"grammar": Grammar(GrammarKind.REGEX, ["a"])}, "grammar.text has a wrong type", "grammar"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_is_refused_by_the_name_of_its_field(wrong: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_sampling(SamplingParams(**wrong), vocab_size=100)
    assert words in error.value.message
    assert error.value.param == param


@pytest.mark.parametrize(
    ("field", "entries"),
    [("logit_bias", tuple((token_id, 1.0) for token_id in range(1025))), ("stop_token_ids", tuple(range(1025)))],
)
def test_what_costs_every_step_is_counted_at_the_door(field: str, entries: tuple[Any, ...]) -> None:
    check_sampling(SamplingParams(**{field: entries[:1024]}), vocab_size=2000)
    with pytest.raises(InvalidRequest, match=f"{field} has 1025 entries; at most 1024 are allowed.") as error:
        check_sampling(SamplingParams(**{field: entries}), vocab_size=2000)
    assert error.value.param == field


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_all_tokens_are_kept_by_any_of_their_names(top_k: int | None) -> None:
    params = SamplingParams(top_k=top_k)
    check_sampling(params, vocab_size=100)
    assert params.top_k is None
