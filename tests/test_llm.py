"""`busllm.LLM`: prompts in, finished answers out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import busllm
from busllm.errors import ConfigError, InvalidRequest, ModelError, NeverFits
from busllm.model_store.resolve import resolve
from busllm.testing.tiny_model import write_tiny_model

GREEDY = busllm.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def llm(tiny: Path) -> Iterator[busllm.LLM]:
    with busllm.LLM(str(tiny), kv_tokens=4096, max_running=8) as llm:
        yield llm
        llm.engine.check_integrity()
        statistics = llm.engine.statistics()
        assert statistics.running == statistics.waiting == statistics.pages_owned == 0


def test_a_prompt_may_be_text_or_ids_one_or_several(llm: busllm.LLM) -> None:
    ids = list(b"Hello")
    (single,) = llm.generate("Hello", GREEDY)
    assert single.prompt_token_ids == tuple(ids)
    assert len(single.token_ids) == 24
    assert single.finish_reason == "length"
    assert llm.generate(["Hello", "Hello"], GREEDY) == [single, single]
    assert llm.generate(ids, GREEDY) == [single]
    assert llm.generate([ids, ids], GREEDY) == [single, single]
    assert llm.generate([], GREEDY) == []


def test_answers_are_the_same_alone_together_and_cached(tiny: Path) -> None:
    prompts = [bytes(range(40 + n, 90 + 3 * n)).decode("latin-1") for n in range(10)]
    sampling = [busllm.SamplingParams(seed=n, max_tokens=40, logprobs=2, frequency_penalty=0.5) for n in range(10)]
    with busllm.LLM(str(tiny), kv_tokens=4096, max_running=4) as llm:
        together = llm.generate(prompts, sampling)
        assert llm.generate(prompts, sampling) == together
        assert llm.engine.statistics().cached_prompt_tokens > 0
    with busllm.LLM(str(tiny), kv_tokens=4096, prefix_cache="none", step_tokens=64) as llm:
        assert [llm.generate(p, s)[0] for p, s in zip(prompts, sampling, strict=True)] == together


def test_an_answer_that_was_interrupted_for_lack_of_pages_is_the_same(tiny: Path) -> None:
    prompts = [[n] * 20 for n in range(6)]
    sampling = [
        busllm.SamplingParams(seed=n, max_tokens=200, ignore_eos=True, logprobs=1, presence_penalty=0.5, min_tokens=150)
        for n in range(6)
    ]
    with busllm.LLM(str(tiny), kv_tokens=4096) as roomy:
        expected = roomy.generate(prompts, sampling)
    with busllm.LLM(str(tiny), kv_tokens=512) as tight:
        assert tight.generate(prompts, sampling) == expected
        assert tight.engine.statistics().retractions > 0
        tight.engine.check_integrity()


def test_a_missing_seed_is_drawn(llm: busllm.LLM) -> None:
    answers = llm.generate(["a"] * 5, busllm.SamplingParams(max_tokens=8))
    assert len({answer.token_ids for answer in answers}) > 1


def test_a_stop_string_ends_the_text_before_it_and_the_count_at_it(llm: busllm.LLM) -> None:
    (whole,) = llm.generate("Hello", GREEDY)
    stop = whole.text[3:5]
    params = busllm.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,), logprobs=0)
    (cut,) = llm.generate("Hello", params)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 24
    assert cut.logprobs is not None and len(cut.logprobs) == len(cut.token_ids)


def test_a_stop_token_counts_but_is_no_text(llm: busllm.LLM) -> None:
    (whole,) = llm.generate("Hello", GREEDY)
    stop = whole.token_ids[5]
    params = busllm.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    (cut,) = llm.generate("Hello", params)
    end = whole.token_ids.index(stop)
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.finish_reason == "stop"
    (before,) = (
        llm.generate("Hello", busllm.SamplingParams(temperature=0.0, max_tokens=end, ignore_eos=True))
        if end
        else (None,)
    )
    assert cut.text == (before.text if before is not None else "")


def test_every_end_of_turn_token_of_the_model_ends_the_answer(llm: busllm.LLM) -> None:
    for eos in (256, 258):
        params = busllm.SamplingParams(temperature=0.0, max_tokens=8, logit_bias=((eos, 100.0),))
        (answer,) = llm.generate("Hello", params)
        assert (answer.token_ids, answer.finish_reason, answer.text) == ((eos,), "stop", "")


def test_min_tokens_hold_the_end_off(llm: busllm.LLM) -> None:
    params = busllm.SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4, logit_bias=((256, 100.0),))
    (answer,) = llm.generate("Hello", params)
    assert len(answer.token_ids) == 5
    assert answer.token_ids[-1] == 256


def test_prompt_log_probabilities_have_one_entry_per_prompt_token(llm: busllm.LLM) -> None:
    params = busllm.SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    (answer,) = llm.generate("Hello world", params)
    assert answer.token_ids == ()
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == 11
    assert all(entry is not None and entry.chosen < 0 for entry in answer.prompt_logprobs[1:])


def test_chats_are_written_by_the_template(llm: busllm.LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt_token_ids == (257, *b"user\nHi", 258, 257, *b"assistant\n")
    assert llm.chat([messages, messages], GREEDY) == [answer, answer]


def test_one_impossible_prompt_ends_the_call_and_leaves_nothing_behind(llm: busllm.LLM) -> None:
    with pytest.raises(InvalidRequest, match="token id 999"):
        llm.generate([[1, 2], [999]], GREEDY)
    with pytest.raises(InvalidRequest, match="no tokens"):
        llm.generate(["fine", ""], GREEDY)
    assert not llm.engine.has_work or llm.engine.step().tokens == ()


def test_a_prompt_that_can_never_fit_is_refused(tiny: Path) -> None:
    with busllm.LLM(str(tiny), kv_tokens=64) as llm, pytest.raises(NeverFits):
        llm.generate([[1] * 100], GREEDY)


def test_settings_must_be_one_or_as_many_as_prompts(llm: busllm.LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts and 3 sampling settings"):
        llm.generate(["a", "b"], [GREEDY] * 3)


@pytest.mark.parametrize(
    ("options", "text"), [({"kv_token": 64}, "kv_tokens"), ({"kv_tokens": "many"}, "kv_tokens"), ({"kv_tokens": 0}, "")]
)
def test_an_impossible_option_is_refused(tiny: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        busllm.LLM(str(tiny), **options)
    assert text in str(error.value)


def test_the_null_model_answers_without_weights() -> None:
    with busllm.LLM("null") as llm:
        (answer,) = llm.generate("Hello", busllm.SamplingParams(max_tokens=20, seed=1))
    assert len(answer.text) == 20


def test_the_default_model_knows_the_capital_of_france() -> None:
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(error.message)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with busllm.LLM("smollm2-135m", kv_tokens=1024) as llm:
        (answer,) = llm.chat(question, busllm.SamplingParams(temperature=0.0, max_tokens=32))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_importing_busllm_imports_no_engine() -> None:
    code = (
        "import sys, busllm; busllm.SamplingParams; assert not {'torch', 'numpy', 'busllm.engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts is None"),
        (["a", 5], "prompts has 5"),
        ([[1.5]], "the token id 1.5; it must be a whole number"),
        ([[2**40]], "which no model has"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(prompts: Any, words: str) -> None:
    with busllm.LLM("null") as llm, pytest.raises(InvalidRequest, match=re.escape(words)) as error:
        llm.generate(prompts, busllm.SamplingParams(max_tokens=1))
    assert error.value.param == "prompts"


class SpeechlessTokenizer:
    """The tokenizer of an `LLM`, without the part that makes text."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode_batch = tokenizer.encode_batch


def test_a_request_whose_text_cannot_be_made_leaves_nothing_behind() -> None:
    params = busllm.SamplingParams(max_tokens=3, seed=1)
    with busllm.LLM("null") as llm:
        expected = llm.generate([[1, 2]], params)
        tokenizer = llm._tokenizer
        llm._tokenizer = SpeechlessTokenizer(tokenizer)  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            llm.generate([[1, 2]], params)
        llm._tokenizer = tokenizer
        assert llm.engine.live() == []
        assert llm.generate([[1, 2]], params) == expected


def test_numbers_of_numpy_are_numbers() -> None:
    params = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "seed": 3, "max_tokens": 4}
    biases, ends = {65: 1.0}, (66,)
    with busllm.LLM("null") as llm:
        plain = llm.generate([[1, 2]], busllm.SamplingParams(**params, logit_bias=biases, stop_token_ids=ends))
        given = {
            key: np.float32(value) if isinstance(value, float) else np.int64(value) for key, value in params.items()
        }
        of_numpy = busllm.SamplingParams(
            **given,
            logit_bias={np.int64(65): np.float64(1.0)},
            stop_token_ids=[np.int32(66)],  # type: ignore[dict-item]
        )
        assert llm.generate([np.array([1, 2])], of_numpy) == plain
    assert (type(of_numpy.temperature), type(of_numpy.top_k)) == (float, int)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_tokens": 0}, "kv_tokens: is 0. Expected `int` >= 1."),
        ({"page_tokens": 0}, "page_tokens: is 0. Expected `int` >= 1."),
        ({"kv_tokens": "4"}, "kv_tokens: is '4'. Expected `int`, got `str`."),
        ({"quantization": "int3"}, "Allowed by name: auto, none, int8, int4. Did you mean 'int8'?"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        busllm.LLM("null", **options)


@pytest.mark.parametrize(
    "grammar",
    [
        busllm.Grammar("choice", ["yes", "no"]),  # type: ignore[arg-type]
        busllm.Grammar(busllm.GrammarKind.REGEX, "yes|no"),
        busllm.Grammar("json_schema", {"enum": ["yes", "no"]}),  # type: ignore[arg-type]
    ],
)
def test_a_grammar_may_be_written_as_people_write_it(grammar: busllm.Grammar) -> None:
    with busllm.LLM("null") as llm:
        text = llm.generate("Well?", busllm.SamplingParams(max_tokens=20, seed=1, grammar=grammar))[0].text
    assert text.strip('"') in ("yes", "no")
