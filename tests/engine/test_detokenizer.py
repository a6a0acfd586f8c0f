from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.timing import best_time
from vllm_lite.engine.detokenizer import Detokenizer, IncrementalDecoder
from vllm_lite.sampling_params import SamplingParams

BYTES = ByteTokenizer()
STOP_ID = 1


def _stream(
    ids: Sequence[int], params: SamplingParams | None = None, prompt: str = "abc", tokenizer: ByteTokenizer = BYTES
) -> tuple[list[str], str | None]:
    """The texts of the messages after each id, the last with what was held back, and the stop string."""
    detokenizer = Detokenizer(tokenizer, params or SamplingParams(), tokenizer.encode(prompt))
    messages, text = [], ""
    for token_id in ids:
        step = detokenizer.append(token_id, check_stop=True)
        text += step.text
        messages.append(text)
        if step.stop is not None:
            assert detokenizer.finish() == ""
            return messages, step.stop
    return [*messages, text + detokenizer.finish()], None


# D1


def test_characters_appear_when_they_are_complete() -> None:
    text = "ok 你好 😀 ďábel"
    messages, _ = _stream(BYTES.encode(text))
    assert messages[-1] == text
    assert all(text.startswith(message) for message in messages)
    lengths = [0, *(len(message) for message in messages[:-1])]
    grown = [index for index in range(1, len(lengths)) if lengths[index] > lengths[index - 1]]
    assert grown == [1, 2, 3, 6, 9, 10, 14, 15, 17, 19, 20, 21, 22]


def test_a_replacement_character_that_the_model_says_comes_through() -> None:
    text = "a\ufffdb\ufffd\ufffd你\ufffd"
    messages, _ = _stream(BYTES.encode(text))
    assert messages[-1] == text
    assert all(text.startswith(message) for message in messages)


def test_an_incomplete_end_is_shown_at_the_end() -> None:
    messages, _ = _stream(BYTES.encode("a你")[:-1])
    assert messages == ["a", "a", "a", "a\ufffd"]


def test_the_start_of_a_token_is_not_held_for_its_incomplete_end() -> None:
    tokenizer = ByteTokenizer([b"yes \xf0\x9f".decode("latin-1")])
    tokenizer._pieces[-1] = b"yes \xf0\x9f"
    tail = BYTES.encode("😀")[2:]
    assert _stream([258, *tail], tokenizer=tokenizer)[0] == ["yes ", "yes ", "yes 😀", "yes 😀"]


TRICKY_BYTES = st.sampled_from(list(b"\xef\xbf\xbd\xe4\xa0\xf0\x9f\x98\x80 A"))


@given(st.lists(TRICKY_BYTES | st.integers(0, 255), max_size=60), st.integers(0, 8))
def test_any_bytes_stream_as_they_decode(values: list[int], num_prompt: int) -> None:
    ids = [BYTES._id_of_byte[value] for value in values]
    decoder, text, longest = IncrementalDecoder(BYTES.decode, ids[:num_prompt]), "", 0
    for token_id in ids[num_prompt:]:
        text += decoder.append(token_id)
        longest = max(longest, len(decoder._open) + len(decoder._context))
    text += decoder.finish()
    whole, prompt = BYTES.decode(ids), BYTES.decode(ids[:num_prompt])
    assert longest <= 24
    # A prompt that ends in half a character: the output begins with the whole character.
    assert whole == (prompt if whole.startswith(prompt) else prompt[:-1]) + text


def test_bytes_that_never_make_a_character_come_through_at_once() -> None:
    ids = [BYTES._id_of_byte[0x80]] * 1000
    messages, _ = _stream(ids)
    assert messages[-1] == "\ufffd" * 1000
    assert all(len(message) >= index - 3 for index, message in enumerate(messages[:-1], 1))


def test_a_decoder_that_never_settles_keeps_nothing_waiting() -> None:
    """What it says of some ids has nothing to do with what it says of their parts."""
    decoder = IncrementalDecoder(lambda ids: "\ufffd" * (len(ids) ** 2), [1])
    assert [len(decoder.append(token_id)) > 0 for token_id in range(6)][3]
    assert len(decoder._open) < 4


# D3, D5


@pytest.mark.parametrize(
    ("skip", "spaces", "expected"), [(True, True, "hiyo"), (True, False, "hiyo"), (False, False, "hi<stop><stop>yo")]
)
def test_special_tokens_are_hidden_or_shown(skip: bool, spaces: bool, expected: str) -> None:
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    ids = [*BYTES.encode("hi"), STOP_ID, STOP_ID, *BYTES.encode("yo")]
    assert _stream(ids, params)[0][-1] == expected


def test_ids_beyond_the_tokenizer_decode_to_nothing() -> None:
    assert _stream([300, 34, 258, 34, 300])[0] == ["", "A", "A", "AA", "AA", "AA"]


# S1, S3


@pytest.mark.parametrize(
    ("stop", "include", "expected", "found"),
    [
        (["DEFGHIJ"], False, "go ABC ", "DEFGHIJ"),
        (["DEFGHIJ"], True, "go ABC DEFGHIJ", "DEFGHIJ"),
        (["END."], False, "go ABC DEFGHIJ xx ", "END."),
        (["END."], True, "go ABC DEFGHIJ xx END.", "END."),
        (["xx", "DEF"], False, "go ABC ", "DEF"),
        ("DEFGHIJ", False, "go ABC ", "DEFGHIJ"),
        (["abc"], False, "go ABC DEFGHIJ xx END. Then more", None),
        (["more and more"], False, "go ABC DEFGHIJ xx END. Then more", None),
    ],
)
def test_stop_strings(stop: str | list[str], include: bool, expected: str, found: str | None) -> None:
    ids = [*BYTES.encode("go ABC DEFGHIJ xx "), 258, *BYTES.encode(" more")]
    messages, reason = _stream(
        ids, SamplingParams(stop=stop, include_stop_str_in_output=include), tokenizer=ByteTokenizer(["END. Then"])
    )
    assert (messages[-1], reason) == (expected, found)
    assert all(messages[-1].startswith(message) for message in messages)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("include", "expected"), [(False, "hello"), (True, "hello<stop>")])
def test_a_special_token_is_a_stop_string_even_when_hidden(skip: bool, include: bool, expected: str) -> None:
    params = SamplingParams(
        stop=["<stop>"],
        skip_special_tokens=skip,
        spaces_between_special_tokens=False,
        include_stop_str_in_output=include,
    )
    messages, reason = _stream([*BYTES.encode("hello"), STOP_ID, *BYTES.encode("world")], params)
    assert (messages[-1], reason) == (expected, "<stop>")


def test_text_held_back_comes_out_before_a_hidden_stop() -> None:
    params = SamplingParams(stop=["<stop>", "lower"])
    messages, _ = _stream([*BYTES.encode("hello 你")[:-1], STOP_ID], params)
    assert messages[-1] == "hello \ufffd"
    messages, _ = _stream([*BYTES.encode("hello"), STOP_ID], params)
    assert messages[-2:] == ["hel", "hello"]


def test_a_stop_string_that_waited_for_its_last_character() -> None:
    """The half character behind it held nothing back; a hidden stop in turn finds what the flushed text completes."""
    params = SamplingParams(stop=["o\ufffd", "<stop>"])
    messages, reason = _stream([*BYTES.encode("hello你")[:-1], STOP_ID], params)
    assert (messages[-1], reason) == ("hell", "o\ufffd")
    messages, reason = _stream(BYTES.encode("hello你")[:-1], params)
    assert (messages[-1], reason) == ("hell", None)


def test_text_is_not_searched_before_min_tokens() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=["ab"]), [])
    unchecked = [detokenizer.append(token_id, check_stop=False) for token_id in BYTES.encode("aba")]
    assert [step.text for step in unchecked] == ["a", "b", "a"]
    checked = [detokenizer.append(token_id, check_stop=True) for token_id in BYTES.encode("bab")]
    assert checked == [("b", None), ("", None), ("", "ab")]
    hidden = Detokenizer(BYTES, SamplingParams(stop=["<stop>"]), [])
    assert hidden.append(STOP_ID, check_stop=False) == ("", None)
    assert hidden.append(0, check_stop=True) == ("", None)
    assert hidden.append(STOP_ID, check_stop=True) == ("", "<stop>")


# D4


def _time_of(length: int, make: Callable[[], Detokenizer], ids: Sequence[int]) -> float:
    """Seconds for 500 ids after the first `length` ids."""

    def prepared() -> Detokenizer:
        detokenizer = make()
        for token_id in ids[:length]:
            detokenizer.append(token_id, check_stop=True)
        return detokenizer

    detokenizers = iter([prepared() for _ in range(5)])

    def run() -> None:
        detokenizer = next(detokenizers)
        for token_id in ids[length : length + 500]:
            detokenizer.append(token_id, check_stop=True)

    return best_time(run)


@pytest.mark.parametrize("text", ["a plain text. ", "你好 😀 ", "\ufffd", "   \n"])
def test_the_cost_of_a_token_is_constant(text: str) -> None:
    ids = BYTES.encode(text * 4500)
    make = lambda: Detokenizer(BYTES, SamplingParams(stop=["END"]), BYTES.encode("abc"))  # noqa: E731
    assert _time_of(4000, make, ids) < 3 * _time_of(0, make, ids)
