"""What people write as sampling parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from busllm.errors import InvalidRequest
from busllm.sampling import SamplingParams, check_sampling


def test_one_stop_string_is_one_stop_string_and_not_its_characters() -> None:
    assert SamplingParams(stop="Paris").stop == ("Paris",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={5: 1.5}).logit_bias == ((5, 1.5),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": "5"}, {"temperature": "hot"}, {"stop": (5,)}, {"seed": 1.5}, {"ignore_eos": "yes"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_type_is_refused_by_name_of_its_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="wrong type"):
        check_sampling(SamplingParams(**wrong), 100)
