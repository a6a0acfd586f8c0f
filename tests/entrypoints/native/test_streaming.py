"""Messages built from pieces equal `json.dumps` of the whole, for any text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.entrypoints.json_style import COMPACT, SPACED
from vllm_lite.entrypoints.native.answer import Answer
from vllm_lite.entrypoints.native.streaming import is_message, stream_messages
from vllm_lite.outputs import CompletionDelta, RequestDelta
from vllm_lite.sampling_params import SamplingParams

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(TEXTS, st.lists(st.lists(st.tuples(st.integers(0, 2), TEXTS), max_size=3), max_size=6))
def test_message_equals_json_dumps_of_the_whole(prompt: str, steps: list[list[tuple[int, str]]]) -> None:
    messages = stream_messages(prompt, (), SamplingParams(n=3), has_details=False, is_deltas=False)
    answer = Answer(prompt, (), 3, COMPACT, has_details=False)
    texts = [prompt] * 3
    for step in [[(index, "") for index in range(3)], *steps]:  # all candidates begin in the first delta
        delta = RequestDelta("r", tuple(CompletionDelta(index, text, (1,)) for index, text in step), False)
        for index, text in step:
            texts[index] += text
        assert messages.add(delta) == json.dumps({"text": texts}).encode("ascii")
        answer.add(delta)
        assert (
            answer.json(has_prompt_details=True)
            == json.dumps({"text": texts}, ensure_ascii=False, separators=(",", ":")).encode()
        )


@pytest.mark.parametrize(
    "text, token_ids, expected", [("a", (1,), True), ("", (1,), True), ("held back", (), True), ("", (), False)]
)
def test_only_tokens_and_text_make_a_message(text: str, token_ids: tuple[int, ...], expected: bool) -> None:
    assert is_message(RequestDelta("r", (CompletionDelta(0, text, token_ids, "abort"),), True)) is expected


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), TEXTS, st.floats(-99, 0)), max_size=3), max_size=5))
def test_details_equal_json_dumps_of_the_whole(steps: list[list[tuple[int, str, float]]]) -> None:
    """Written token by token, read as one."""
    answer = Answer("p", (7, 8), 3, SPACED, has_details=True)
    start = [CompletionDelta(index, "", (), logprobs=()) for index in range(3)]
    answer.add(RequestDelta("r", tuple(start), False, prompt_logprobs=[None, {8: -0.25}]))
    ids: list[list[int]] = [[], [], []]
    entries: list[list[dict[str, float]]] = [[], [], []]
    for step in steps:
        for index, text, logprob in step:
            delta = CompletionDelta(index, text, (index + 5,), "length", "x", -1.5, ({index + 5: logprob},))
            answer.add(RequestDelta("r", (delta,), False))
            ids[index].append(index + 5)
            entries[index].append({str(index + 5): logprob})
    parsed = json.loads(answer.json(has_prompt_details=True))
    assert (parsed["token_ids"], parsed["logprobs"]) == (ids, entries)
    assert parsed["finish_reason"] == ["length" if one else None for one in ids]
    assert parsed["cumulative_logprob"] == [-1.5 if one else None for one in ids]
    assert (parsed["prompt_token_ids"], parsed["prompt_logprobs"]) == ([7, 8], [None, {"8": -0.25}])
    assert (parsed["num_prompt_tokens"], parsed["num_generated_tokens"]) == (2, sum(map(len, ids)))
    assert "prompt_token_ids" not in json.loads(answer.json(has_prompt_details=False))


def test_the_end_of_a_request_is_a_message_where_its_reason_is_told() -> None:
    end = RequestDelta("r", (CompletionDelta(0, "", (), "abort"),), True)
    assert is_message(end, has_details=True) and not is_message(end)
