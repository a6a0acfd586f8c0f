"""Messages built from pieces equal `json.dumps` of the whole, for any text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.entrypoints.streaming import CumulativeTexts, is_message
from vllm_lite.outputs import CompletionDelta, RequestDelta

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(TEXTS, st.lists(st.lists(st.tuples(st.integers(0, 2), TEXTS), max_size=3), max_size=6))
def test_message_equals_json_dumps_of_the_whole(prompt: str, steps: list[list[tuple[int, str]]]) -> None:
    messages = CumulativeTexts(prompt, 3, b"\0")
    texts = [prompt] * 3
    for step in [[(index, "") for index in range(3)], *steps]:  # all candidates begin in the first delta
        delta = RequestDelta("r", tuple(CompletionDelta(index, text, (1,)) for index, text in step), False)
        for index, text in step:
            texts[index] += text
        assert messages.add(delta) == json.dumps({"text": texts}).encode("ascii") + b"\0"


@pytest.mark.parametrize(
    "text, token_ids, expected", [("a", (1,), True), ("", (1,), True), ("held back", (), True), ("", (), False)]
)
def test_only_tokens_and_text_make_a_message(text: str, token_ids: tuple[int, ...], expected: bool) -> None:
    assert is_message(RequestDelta("r", (CompletionDelta(0, text, token_ids, "abort"),), True)) is expected
