"""The value of `messages`, without a server and without a template."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vllm_lite.entrypoints.openai.chat_messages import MAX_MESSAGES, parse_messages
from vllm_lite.errors import RequestError

HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "message, parsed",
    [
        (HI, HI),
        ({"role": "anything at all", "content": ""}, {"role": "anything at all", "content": ""}),
        (HI | {"name": "Ann"}, HI | {"name": "Ann"}),
        (HI | {"name": None}, HI),
        (HI | {"content": [{"type": "text", "text": "a"}]}, HI | {"content": "a"}),
        (
            HI | {"content": [{"type": "text", "text": "a\n"}, {"text": " b", "type": "text"}]},
            HI | {"content": "a\n\n b"},
        ),
        (HI | {"content": []}, HI | {"content": ""}),
        (HI | {"tool_calls": [], "function_call": None, "refusal": None, "audio": None, "annotations": []}, HI),
    ],
)
def test_messages_become_plain_ones(message: Any, parsed: dict[str, str]) -> None:
    assert parse_messages([HI, message]) == [HI, parsed]


def _part(**fields: Any) -> dict[str, Any]:
    return HI | {"content": [{"type": "text", "text": "a"}, fields]}


@pytest.mark.parametrize(
    "messages, why",
    [
        (None, "messages must be a list of at least one message, got null."),
        ([], "messages must be a list of at least one message, got an empty list."),
        ("hi", "messages must be a list of at least one message, got a string."),
        (HI, "messages must be a list of at least one message, got an object."),
        ([HI, "hi"], "messages[1] must be an object with role and content, got a string."),
        ([HI, [HI]], "messages[1] must be an object with role and content, got a list."),
        ([{"content": "hi"}], "messages[0].role is missing; it must be a string."),
        ([HI | {"role": 1}], "messages[0].role must be a string, got a number."),
        ([HI | {"role": None}], "messages[0].role must be a string, got null."),
        ([HI, HI, {"role": "user"}], "messages[2].content is missing; it must be a string."),
        ([HI | {"content": None}], "messages[0].content must be a string or a list of text parts, got null."),
        ([HI | {"content": {}}], "messages[0].content must be a string or a list of text parts, got an object."),
        ([HI | {"content": 1.5}], "messages[0].content must be a string or a list of text parts, got a number."),
        ([HI | {"name": 5}], "messages[0].name must be a string, got a number."),
        ([HI | {"nmae": 5}], "messages[0].'nmae' is not a known field; known are role, content and name."),
        ([HI | {"tool_calls": [{}]}], "messages[0].tool_calls must be null or left out: tools are not supported"),
        ([HI | {"tool_call_id": "x"}], "messages[0].tool_call_id must be null or left out: tools are not supported"),
        ([HI | {"function_call": {}}], "messages[0].function_call must be null or left out: tools are not supported"),
        ([HI | {"audio": {"id": "x"}}], "messages[0].audio must be null or left out: audio is not supported."),
        ([HI | {"content": ["a"]}], "messages[0].content[0] must be an object like {"),
        ([_part(text="b")], "messages[0].content[1].type is missing; it must be a string."),
        ([_part(type=1, text="b")], "messages[0].content[1].type must be a string, got a number."),
        ([_part(type="text")], "messages[0].content[1].text is missing; it must be a string."),
        ([_part(type="text", text=None)], "messages[0].content[1].text must be a string, got null."),
        ([_part(type="text", text="b", x=1)], "messages[0].content[1].'x' is not a known field; known are type and"),
        ([_part(type="image_url", image_url={})], "messages[0].content[1].type must be 'text', got 'image_url': other"),
        ([_part(type="input_audio")], "messages[0].content[1].type must be 'text', got 'input_audio': other parts"),
        ([HI] * (MAX_MESSAGES + 1), f"messages must be at most {MAX_MESSAGES}, got {MAX_MESSAGES + 1}."),
    ],
)
def test_what_is_wrong_is_named(messages: Any, why: str) -> None:
    with pytest.raises(RequestError, match=re.escape(why)):
        parse_messages(json.loads(json.dumps(messages)))


@pytest.mark.parametrize("message", [HI | {"x" * 10**6: 1}, _part(type="x" * 10**6)])
def test_answer_is_short_whatever_was_sent(message: Any) -> None:
    with pytest.raises(RequestError) as raised:
        parse_messages([message])
    assert len(str(raised.value)) < 300


def test_as_many_messages_as_are_allowed() -> None:
    assert len(parse_messages([HI] * MAX_MESSAGES)) == MAX_MESSAGES
