from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.timing import best_time
from vllm_lite.engine.stop_strings import StopStringFilter


def _run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """The texts let through and the stop string found; without one the held text is the last of the texts."""
    stop_filter, shown = StopStringFilter(stops, include), []
    for piece in pieces:
        text, stop = stop_filter.push(piece)
        shown.append(text)
        if stop is not None:
            assert stop_filter.flush() == ""
            return shown, stop
    return [*shown, stop_filter.flush()], None


def _expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the first end at which any stop string is complete, the longest of those."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.booleans(), st.data()
)
def test_result_does_not_depend_on_the_pieces(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
    shown, stop = _run(pieces, stops, include)
    assert ("".join(shown), stop) == _expected(text, stops, include)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_only_what_could_still_be_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    stop_filter, shown = StopStringFilter(stops, False), ""
    for end, char in enumerate(text, 1):
        new, stop = stop_filter.push(char)
        shown += new
        if stop is not None:
            return
        held = text[len(shown) : end]
        suffixes = [text[begin:end] for begin in range(end)]
        longest = max((len(s) for s in suffixes if any(x.startswith(s) for x in stops)), default=0)
        assert len(held) == longest


def test_the_first_to_be_complete_wins() -> None:
    assert _run(["go ABC DEFGHIJ xx"], ["xx", "DEF"]) == (["go ABC "], "DEF")
    assert _run(["abcd"], ["bcd", "c"]) == (["ab"], "c")
    assert _run(["abcd"], ["c", "bc"]) == (["a"], "bc")


def test_found_inside_a_piece_and_across_pieces() -> None:
    assert _run(["xx ", "END. Then"], ["END."]) == (["xx ", ""], "END.")
    assert _run(["xx ", "END. Then"], ["END."], include=True) == (["xx ", "END."], "END.")
    assert _run(["a<", "s", "to", "p>b"], ["<stop>"]) == (["a", "", "", ""], "<stop>")
    assert _run(["a<", "s", "to", "x"], ["<stop>"]) == (["a", "", "", "<stox", ""], None)


def test_without_stop_strings_nothing_is_held() -> None:
    assert _run(["a", "b"], []) == (["a", "b", ""], None)


@pytest.mark.parametrize("text", ["a" * 3000, "ab" * 1500, "".join(random.Random(1).choices("abc \n", k=3000))])
def test_many_long_stop_strings_cost_little_more_than_one(text: str) -> None:
    """64 stop strings of 1,024 characters, made to be nearly met all the time: some microseconds a character."""
    stops = ["a" * (1023 - index) + "b" + "a" * index for index in range(64)]
    pieces = list(text)
    time_of_one = best_time(lambda: _run(pieces, ["END"]), num_runs=3)
    assert best_time(lambda: _run(pieces, stops), num_runs=3) < 40 * time_of_one


def test_a_long_piece_costs_linear_time() -> None:
    stops = ["a" * (500 + index) + "b" for index in range(16)]

    def push(length: int) -> None:
        StopStringFilter(stops, False).push("a" * length)

    assert best_time(lambda: push(100_000), num_runs=3) < 60 * best_time(lambda: push(5_000), num_runs=3)
