"""The deltas of a decoder, against the decode of the whole."""

from __future__ import annotations

import random

import pytest

from busllm.text.decoder import Decoder
from busllm.text.null_tokenizer import NullTokenizer
from busllm.text.stop_strings import StopMatcher
from busllm.text.tokenizer import Tokenizer

INVALID = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "Hello world. The end.",
    "🦊🇳🇴 żółć 漢字 👩‍🔬",
    "blåbærsyltetøy på skiva",
    "def f(x):\n    return x  # two  blanks\n\n- a list\n- of two",
    "  leading and trailing  ",
    " , . ! ?",
    f"a real {INVALID} in the text",
    "a",
]


def _pushes(ids: list[int], source: random.Random) -> list[list[int]]:
    """The ids in calls of random lengths, empty ones too."""
    pushes: list[list[int]] = []
    while ids:
        length = source.randint(0, 4)
        pushes.append(ids[:length])
        ids = ids[length:]
    return pushes


def _text(decoder: Decoder, pushes: list[list[int]]) -> str:
    return "".join(decoder.push(ids).text for ids in pushes) + decoder.flush()


@pytest.mark.parametrize("prompt", ["", "Say it:", "A prompt that ends with a blank "])
@pytest.mark.parametrize("text", TEXTS)
def test_the_deltas_join_to_the_whole_decode(tokenizer: Tokenizer, prompt: str, text: str):
    source = random.Random(text)
    prompt_ids, ids = tokenizer.encode_batch([prompt, text], False)
    before, whole = tokenizer.decode(prompt_ids, True), tokenizer.decode(prompt_ids + ids, True)
    assert whole.startswith(before)
    for _ in range(5):
        decoder = Decoder(tokenizer, prompt_tail_ids=prompt_ids)
        assert _text(decoder, _pushes(ids, source)) == whole[len(before) :]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_tokens_of_a_byte_tokenizer_give_the_whole_decode_exactly(smollm: Tokenizer, skip_special_tokens: bool):
    source = random.Random(1)
    half_characters = [token_id for token_id in range(smollm.vocab_size) if smollm.token_bytes(token_id)[:1] >= b"\x80"]
    pools = [range(smollm.vocab_size), half_characters, half_characters + list(range(17))]
    for _ in range(1500):
        pool = source.choice(pools)
        prompt = source.choices(pool, k=source.randint(0, 30))
        ids = source.choices(pool, k=source.randint(0, 12))
        before = smollm.decode(prompt, skip_special_tokens)
        if before.endswith(INVALID):
            continue
        decoder = Decoder(smollm, prompt_tail_ids=prompt, skip_special_tokens=skip_special_tokens)
        whole = smollm.decode(prompt + ids, skip_special_tokens)
        assert before + _text(decoder, _pushes(ids, source)) == whole


def test_random_tokens_with_byte_fallback_lose_and_repeat_nothing(byte_fallback: Tokenizer):
    source = random.Random(2)
    words = list(range(259, byte_fallback.vocab_size))
    for _ in range(1500):
        ids: list[int] = []
        for _ in range(source.randint(1, 8)):
            character = source.choice("aé漢🦊\n")
            ids += [3 + byte for byte in character.encode()] if source.random() < 0.5 else [source.choice(words)]
        if source.random() < 0.3:
            # Behind a word: right behind the bytes of a whole character they would make that invalid too.
            ids += [source.choice(words), *(3 + byte for byte in "🦊".encode()[: source.randint(1, 3)])]
        prompt = source.choices(words, k=source.randint(0, 5))
        decoder = Decoder(byte_fallback, prompt_tail_ids=prompt)
        whole = byte_fallback.decode(prompt + ids, True)
        assert _text(decoder, _pushes(ids, source)) == whole[len(byte_fallback.decode(prompt, True)) :]


def test_bad_bytes_after_good_ones_do_not_stop_a_byte_fallback_stream(byte_fallback: Tokenizer):
    good, bad = 3 + ord("a"), 3 + 0xFF
    words = byte_fallback.encode_batch(["the hello"], False)[0]
    decoder = Decoder(byte_fallback)
    text = "".join(decoder.push([token_id]).text for token_id in [good, bad, *words, good, bad, bad, *words])
    assert text + decoder.flush() == f"a{INVALID} the helloa{INVALID}{INVALID} the hello"


def test_an_endless_run_of_bad_bytes_is_given_up_on(byte_fallback: Tokenizer):
    decoder = Decoder(byte_fallback)
    texts = [decoder.push([3 + 0xFF]).text for _ in range(100)]
    longest_wait = max(len(piece) for piece in texts)
    assert 0 < longest_wait < 50
    assert "".join(texts) + decoder.flush() == INVALID * 100


@pytest.mark.parametrize("name", ["smollm", "byte_fallback", "null"])
def test_a_character_is_delivered_with_its_last_byte(name: str, request: pytest.FixtureRequest):
    tokenizer = NullTokenizer() if name == "null" else request.getfixturevalue(name)
    ids = tokenizer.encode_batch(["a🦊"], False)[0]
    decoder = Decoder(tokenizer)
    texts = [decoder.push([token_id]).text for token_id in ids]
    assert "".join(texts) == tokenizer.decode(ids, True)
    assert texts[-1] == "🦊"
    assert INVALID not in "".join(texts)


@pytest.mark.parametrize("name", ["smollm", "byte_fallback", "null"])
def test_a_prompt_that_ends_inside_a_character_does_not_leak(name: str, request: pytest.FixtureRequest):
    tokenizer = NullTokenizer() if name == "null" else request.getfixturevalue(name)
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))}
    fox = [by_byte[bytes([byte])] for byte in "🦊".encode() if bytes([byte]) in by_byte]
    if len(fox) < 4:
        fox = tokenizer.encode_batch(["🦊"], False)[0]
    letter = tokenizer.encode_batch(["ab"], False)[0][-1:]
    after_letter = tokenizer.decode([*letter, *letter], True)[len(tokenizer.decode(letter, True)) :]
    prompt, rest = [*letter, *fox[:-1]], fox[-1:]
    completed = Decoder(tokenizer, prompt_tail_ids=prompt)
    assert completed.push(rest).text + completed.push(letter).text == "🦊" + after_letter
    not_completed = Decoder(tokenizer, prompt_tail_ids=prompt)
    assert not_completed.push(letter).text + not_completed.flush() == after_letter
    assert Decoder(tokenizer, prompt_tail_ids=prompt).flush() == ""


def test_a_first_word_has_its_blank_only_after_a_prompt_with_text(byte_fallback: Tokenizer):
    hello = [
        token_id for token_id in range(byte_fallback.vocab_size) if byte_fallback.token_bytes(token_id) == b" hello"
    ]
    assert len(hello) == 1
    assert Decoder(byte_fallback).push(hello).text == "hello"
    assert Decoder(byte_fallback, prompt_tail_ids=[1]).push(hello).text == "hello"
    assert Decoder(byte_fallback, prompt_tail_ids=[1, *hello]).push(hello).text == " hello"


def test_special_tokens_are_text_only_when_asked_for(smollm: Tokenizer):
    ids = smollm.encode_batch(["Hi<|im_end|>"], False)[0]
    assert Decoder(smollm).push(ids).text == "Hi"
    assert Decoder(smollm, skip_special_tokens=False).push(ids).text == "Hi<|im_end|>"


def test_a_stop_string_across_tokens_is_cut_and_its_beginning_never_delivered(smollm: Tokenizer):
    ids = smollm.encode_batch(["five, six, seven, eight, nine"], False)[0]
    decoder = Decoder(smollm, stop=("seven, eight",))
    text, num_kept = "", 0
    for token_id in ids:
        delta = decoder.push([token_id])
        text += delta.text
        num_kept += delta.num_tokens_kept
        assert "five, six, ".startswith(text)
        if delta.stopped:
            break
    assert text == "five, six, "
    assert decoder.stopped and decoder.num_tokens == num_kept
    assert smollm.decode(ids[:num_kept], True).endswith("seven, eight")
    assert decoder.flush() == ""
    assert decoder.push(ids) == ("", True, 0)


def test_tokens_behind_the_one_that_completes_a_stop_string_do_not_count(smollm: Tokenizer):
    ids = smollm.encode_batch(["one two three four"], False)[0]
    delta = Decoder(smollm, stop=(" three",)).push(ids)
    assert delta.text == "one two"
    assert delta.stopped
    assert smollm.decode(ids[: delta.num_tokens_kept], True) == "one two three"


def test_a_stop_string_inside_a_token_is_found():
    null = NullTokenizer()
    delta = Decoder(null, stop=("ll",)).push(list(b"hello"))
    assert delta == ("he", True, 4)


def test_text_that_only_looked_like_a_stop_string_is_delivered(smollm: Tokenizer):
    ids = smollm.encode_batch(["one two three"], False)[0]
    decoder = Decoder(smollm, stop=(" three four",))
    assert decoder.push(ids).text == "one two"
    assert decoder.flush() == " three"


def test_an_incomplete_character_at_the_end_can_complete_a_stop_string():
    decoder = Decoder(NullTokenizer(), stop=("b" + INVALID,))
    assert decoder.push(list(b"ab\xf0\x9f")).text == "a"
    assert decoder.flush() == ""
    assert decoder.stopped


def test_a_stop_string_does_not_end_before_the_fewest_tokens():
    decoder = Decoder(NullTokenizer(), stop=("x",), min_tokens=3)
    assert decoder.push(list(b"axbxc")) == ("axb", True, 4)


@pytest.mark.parametrize("stop", [(), ("ab",), ("b d", "cde"), ("hello, world",)])
def test_the_text_does_not_depend_on_how_tokens_are_spread_over_pushes(tokenizer: Tokenizer, stop: tuple[str, ...]):
    source = random.Random(3)
    for _ in range(100):
        ids = source.choices(range(tokenizer.vocab_size), k=12)
        ids += tokenizer.encode_batch([source.choice(["a b c d", "hello hello", "ab ab"])], False)[0]
        one_by_one = Decoder(tokenizer, stop=stop)
        expected = _text(one_by_one, [[token_id] for token_id in ids])
        many = Decoder(tokenizer, stop=stop)
        assert _text(many, _pushes(ids, source)) == expected
        assert (many.stopped, many.num_tokens) == (one_by_one.stopped, one_by_one.num_tokens)


def test_a_replayed_sequence_goes_on_where_the_first_decoder_was(tokenizer: Tokenizer):
    source = random.Random(4)
    ids = tokenizer.encode_batch(["hello 🦊 the a blåbær, hello"], False)[0] + source.choices(range(20), k=10)
    for cut in range(len(ids) + 1):
        first = Decoder(tokenizer, stop=("zz", "hello hello"))
        delivered = first.push(ids[:cut]).text
        rest = first.push(ids[cut:]).text + first.flush()
        for num_delivered_chars in {0, len(delivered) // 2, len(delivered)}:
            second = Decoder(tokenizer, stop=("zz", "hello hello"))
            text = second.replay(ids[:cut], num_delivered_chars).text
            assert text == delivered[num_delivered_chars:]
            assert second.push(ids[cut:]).text + second.flush() == rest


def test_the_stop_that_ends_first_wins_however_the_text_is_cut():
    source = random.Random(5)
    for _ in range(3000):
        stop = tuple("".join(source.choices("ab", k=source.randint(1, 4))) for _ in range(source.randint(1, 3)))
        text = "".join(source.choices("abc", k=source.randint(0, 12)))
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(stop)]
        expected = text
        if ends:
            length = max(len(word) for word in stop if text[: ends[0]].endswith(word))
            expected = text[: ends[0] - length]
        matcher, seen, position = StopMatcher(stop), "", 0
        while position < len(text):
            length = source.randint(1, 4)
            found = matcher.push(text[position : position + length])
            seen, position = seen + found.text, position + length
            if found.stopped:
                break
            held = text[len(seen) : position]
            assert held == "" or any(word.startswith(held) for word in stop)
        assert seen + matcher.flush() == expected
