"""Which tokens may come next: every prefix of a right answer goes through, and nothing else does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busllm.errors import InvalidRequest
from busllm.grammar.compiler import MAX_CACHED, GrammarCompiler
from busllm.grammar.matcher import GrammarMatcher
from busllm.grammar.vocabulary import Vocabulary
from busllm.sampling import Grammar, GrammarKind

NUM_BYTES = 256
EOS, TURN = 256, 257
WORDS = (b"tr", b"ue", b'{"', b'":', b" ", b"12", b"yes", b"ye", b"no")
NUM_LOGITS = 256 + 2 + len(WORDS) + 5  # the last five have no token


def vocabulary() -> Vocabulary:
    """Every byte, two special tokens, a few longer tokens that overlap, and logits without a token."""
    tokens = [bytes([value]) for value in range(NUM_BYTES)] + [b"<eos>", b"<turn>", *WORDS, *[b""] * 5]
    return Vocabulary(tuple(tokens), frozenset({EOS, TURN}), (EOS,), lambda text: list(text.encode()))


COMPILER = GrammarCompiler(vocabulary)
TOKENS = vocabulary().token_bytes


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def schema(**keywords: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(keywords))


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def allowed_texts(matcher: GrammarMatcher, **ends: object) -> set[bytes]:
    return {TOKENS[token_id] for token_id in np.flatnonzero(matcher.allowed(**ends))}  # type: ignore[arg-type]


def walk(grammar: Grammar, text: str) -> GrammarMatcher:
    """A matcher after a text, byte by byte; each byte must be allowed."""
    matcher = COMPILER.matcher(grammar)
    for byte in text.encode():
        assert matcher.allowed()[byte], (text, bytes([byte]))
        matcher.take([byte])
    return matcher


def test_a_choice_allows_every_token_that_begins_one_of_its_texts() -> None:
    matcher = COMPILER.matcher(choice("yes", "no"))
    assert allowed_texts(matcher) == {b"y", b"ye", b"yes", b"n", b"no"}
    matcher.take([ord("n")])
    assert allowed_texts(matcher) == {b"o"}
    assert not matcher.may_end
    matcher.take([ord("o")])
    assert allowed_texts(matcher) == {b"<eos>"}
    assert matcher.is_complete


@pytest.mark.parametrize("texts", [('a"b', "back\\slash"), ("é😀",), ("new\nline", "tab\t"), ("/x/", "'"), ("\x01",)])
def test_a_choice_is_taken_by_the_letter(texts: tuple[str, ...]) -> None:
    for text in texts:
        assert walk(choice(*texts), text).may_end


@pytest.mark.parametrize("number", [2_001, 20_000])
def test_a_choice_may_have_very_many_texts(number: int) -> None:
    texts = [f"label {index}" for index in range(number)]
    assert walk(choice(*texts), texts[-1]).may_end
    assert not walk(choice(*texts), "label").may_end


def test_a_choice_may_have_an_empty_text() -> None:
    matcher = COMPILER.matcher(choice("", "no"))
    assert matcher.may_end
    assert allowed_texts(matcher) == {b"n", b"no", b"<eos>"}


def test_special_tokens_and_logits_without_a_token_are_never_text() -> None:
    matcher = COMPILER.matcher(regex("(.|\n)*"))
    allowed = np.flatnonzero(matcher.allowed()).tolist()
    assert TURN not in allowed
    assert max(allowed) < NUM_LOGITS - 5
    assert EOS in allowed  # where an answer may end
    assert allowed_texts(COMPILER.matcher(regex("<turn>"))) == {b"<"}


def test_an_end_comes_only_where_the_answer_may_end() -> None:
    matcher = COMPILER.matcher(regex("[0-9]{2,3}"))
    matcher.take([ord("1")])
    assert EOS not in np.flatnonzero(matcher.allowed())
    matcher.take([ord("2")])
    assert EOS in np.flatnonzero(matcher.allowed())
    matcher.take([ord("3")])
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]


def test_ignoring_the_end_of_turn_puts_it_off_until_nothing_else_can_come() -> None:
    matcher = COMPILER.matcher(regex("[0-9]{2,3}"))
    matcher.take(list(b"12"))
    assert EOS not in np.flatnonzero(matcher.allowed(ignore_eos=True))
    matcher.take(list(b"3"))
    assert np.flatnonzero(matcher.allowed(ignore_eos=True)).tolist() == [EOS]


def test_stop_tokens_may_come_where_the_answer_may_end() -> None:
    matcher = COMPILER.matcher(regex("[0-9]{2}"))
    matcher.take([ord("1")])
    assert not matcher.allowed(stop_token_ids=(TURN,))[TURN]
    matcher.take([ord("2")])
    assert np.flatnonzero(matcher.allowed(stop_token_ids=(TURN,))).tolist() == [EOS, TURN]


def test_what_follows_the_end_is_ignored() -> None:
    matcher = COMPILER.matcher(choice("no"))
    matcher.take([ord("n"), ord("o"), EOS])
    matcher.take([ord("x")])
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]


def test_a_token_that_is_not_allowed_is_an_error_and_remains_one() -> None:
    matcher = COMPILER.matcher(Grammar(GrammarKind.CHOICE, '["no"]', "response_format"))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="cannot be followed") as caught:
            matcher.take([ord("x")])
        assert caught.value.param == "response_format"
        assert "\n<" not in caught.value.message
    with pytest.raises(InvalidRequest):
        matcher.allowed()


def test_a_place_that_no_token_leads_out_of_is_an_error() -> None:
    letters = Vocabulary((b"a", b"<eos>"), frozenset({1}), (1,), lambda text: [0] * text.count("a"))
    matcher = GrammarCompiler(lambda: letters).matcher(regex("ab"))
    matcher.take([0])
    with pytest.raises(InvalidRequest):
        matcher.allowed()


letters = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | letters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(letters, values, max_size=3), st.sampled_from([None, 1, 2]))
def test_every_prefix_of_every_object_is_allowed(value: dict[str, object], indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert walk(schema(type="object"), text).may_end


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_whatever_is_chosen_among_the_allowed_tokens_parses_and_validates(seed: int, ignore_eos: bool) -> None:
    grammar = schema(
        type="object",
        properties={
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "kind": {"enum": ["cat", "dog"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        required=["name", "age", "kind", "tags"],
        additionalProperties=False,
    )
    source, matcher, answer = np.random.default_rng(seed), COMPILER.matcher(grammar), b""
    while True:
        choices = np.flatnonzero(matcher.allowed(ignore_eos=ignore_eos))
        token_id = int(source.choice(choices))
        if token_id == EOS:
            break
        matcher.take([token_id])
        answer += TOKENS[token_id]
    read = json.loads(answer)
    assert set(read) == {"name", "age", "kind", "tags"}
    assert len(read["name"]) <= 5
    assert 0 <= read["age"] <= 130
    assert read["kind"] in ("cat", "dog")
    assert len(read["tags"]) <= 2
    assert all(type(tag) is bool for tag in read["tags"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 5), max_size=20))
def test_a_matcher_that_takes_the_tokens_again_is_in_the_same_place(seed: int, portions: list[int]) -> None:
    source, live, taken = np.random.default_rng(seed), COMPILER.matcher(schema(type="object")), []
    for portion in portions:
        for _ in range(portion):
            token_id = int(source.choice(np.flatnonzero(live.allowed())))
            live.take([token_id])
            taken.append(token_id)
        again = COMPILER.matcher(schema(type="object"))
        again.take(taken)
        assert again.num_taken == live.num_taken == len(taken)
        assert np.array_equal(again.allowed(), live.allowed())
        assert again.may_end == live.may_end


def test_blanks_between_words_of_json_come_to_an_end() -> None:
    matcher = walk(schema(type="object"), "{" + "\n" * 32)
    assert not matcher.allowed()[ord("\n")]


def test_a_context_free_grammar_is_followed() -> None:
    nested = Grammar(GrammarKind.LARK, 'start: "(" start ")" | "x"')
    assert walk(nested, "((x))").is_complete
    assert not walk(nested, "((x)").may_end


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("[0-9"), "unclosed"),
        (schema(type="nonsense"), "nonsense"),
        (schema(enum=[]), "Unsatisfiable"),
        (schema(**{"not": {"type": "string"}}), "not"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "no JSON schema"),
        (Grammar(GrammarKind.JSON_SCHEMA, "7"), "no JSON schema"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"a":' * 500 + "1" + "}" * 500), "recursion"),
        (choice(), "no text"),
        (choice(""), "no text"),
        (Grammar(GrammarKind.CHOICE, "[1]"), "list of texts"),
        (Grammar(GrammarKind.LARK, "start: missing"), "missing"),
        (Grammar(GrammarKind.LARK, "start: " + " | ".join(f'"a{index}"' for index in range(3_000))), "2000"),
        (Grammar(GrammarKind.LARK, "start: " + "(" * 10_000), "nested"),
    ],
)
def test_what_does_not_compile_is_refused_by_name(grammar: Grammar, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        COMPILER.matcher(grammar)
    assert caught.value.param == "grammar"
    assert len(caught.value.message) < 600


def test_a_model_without_an_end_of_turn_takes_no_grammar() -> None:
    compiler = GrammarCompiler(lambda: Vocabulary((b"a",), frozenset(), (), lambda text: [0]))
    with pytest.raises(InvalidRequest, match="ends a turn"):
        compiler.matcher(regex("a"))


def test_a_grammar_that_no_token_can_begin_is_refused_before_an_answer_begins() -> None:
    letters = Vocabulary((b"a", b"<eos>"), frozenset({1}), (1,), lambda text: [0] * text.count("a"))
    with pytest.raises(InvalidRequest) as caught:
        GrammarCompiler(lambda: letters).compiled(Grammar(GrammarKind.REGEX, "b", "structured_outputs.regex"))
    assert caught.value.param == "structured_outputs.regex"


def test_matchers_of_one_grammar_do_not_share_their_place() -> None:
    first, second = COMPILER.matcher(choice("no", "yes")), COMPILER.matcher(choice("no", "yes"))
    first.take([ord("n")])
    assert allowed_texts(second) == {b"y", b"ye", b"yes", b"n", b"no"}


def test_more_grammars_than_are_kept_and_many_threads_at_once() -> None:
    """A grammar that has left the cache is compiled again; the vocabulary is loaded once."""
    loads: list[int] = []

    def load() -> Vocabulary:
        loads.append(1)
        return vocabulary()

    compiler = GrammarCompiler(load)
    words = [f"w{number}" for number in range(MAX_CACHED * 2)] * 2
    with ThreadPoolExecutor(8) as threads:
        matchers = list(threads.map(lambda word: compiler.matcher(choice(word)), words))
    for word, matcher in zip(words, matchers, strict=True):
        matcher.take(list(word.encode()))
        assert matcher.is_complete
    assert len(loads) == 1


def test_the_schema_true_takes_any_json_and_the_schema_false_is_refused_in_words() -> None:
    anything = COMPILER.matcher(Grammar(GrammarKind.JSON_SCHEMA, " true "))
    assert set(np.flatnonzero(anything.allowed())) >= set(b'{["t-0')
    with pytest.raises(InvalidRequest, match="the schema `false`, which no answer fits"):
        COMPILER.compiled(Grammar(GrammarKind.JSON_SCHEMA, "false", "structured_outputs.json"))
