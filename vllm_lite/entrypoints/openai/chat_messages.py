"""The `messages` of a chat: a JSON value to dicts that a chat template can read, strictly. Knows no template."""

from __future__ import annotations

from typing import Any

from vllm_lite.entrypoints.json_body import kind_of
from vllm_lite.errors import RequestError

MAX_MESSAGES = 4096
"""A template may look at all messages for each of them: with this many that takes seconds, with many more hours."""
MAX_QUOTED_CHARS = 100

NO_TOOLS = "tools are not supported"
NOT_SUPPORTED = {
    "tool_calls": NO_TOOLS,
    "tool_call_id": NO_TOOLS,
    "function_call": NO_TOOLS,
    "audio": "audio is not supported",
    "annotations": "annotations are not supported",
    "refusal": "refusals are not supported",
}
"""Fields of OpenAI's messages. Null and an empty list are fine: clients send back what an answer held."""


def parse_messages(value: Any) -> list[dict[str, str]]:
    """Messages with the keys `role`, `content` and, where given, `name`, all of them text.

    A role may be any text: the template decides. Parts of a content are joined with newlines, as vLLM does for
    templates that want text. Raises RequestError that names the place, such as `messages[2].content`.
    """
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else kind_of(value)
        raise RequestError(f"messages must be a list of at least one message, got {got}.")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"messages must be at most {MAX_MESSAGES}, got {len(value)}.")
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _parse_message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with role and content, got {kind_of(message)}.")
    for name, value in message.items():
        if name in NOT_SUPPORTED and value is not None and value != []:
            raise RequestError(f"{place}.{name} must be null or left out: {NOT_SUPPORTED[name]}.")
        if name not in ("role", "content", "name", *NOT_SUPPORTED):
            raise RequestError(f"{place}.{_echo(name)} is not a known field; known are role, content and name.")
    parsed = {"role": _parse_text(message, "role", place), "content": _parse_content(message, place)}
    if message.get("name") is not None:
        parsed["name"] = _parse_text(message, "name", place)
    return parsed


def _parse_text(fields: dict[str, Any], name: str, place: str) -> str:
    if name not in fields:
        raise RequestError(f"{place}.{name} is missing; it must be a string.")
    if not isinstance(fields[name], str):
        raise RequestError(f"{place}.{name} must be a string, got {kind_of(fields[name])}.")
    text: str = fields[name]
    return text


def _parse_content(message: dict[str, Any], place: str) -> str:
    parts = message.get("content")
    if not isinstance(parts, list):
        if "content" in message and not isinstance(parts, str):
            raise RequestError(f"{place}.content must be a string or a list of text parts, got {kind_of(parts)}.")
        return _parse_text(message, "content", place)
    return "\n".join(_parse_part(part, f"{place}.content[{index}]") for index, part in enumerate(parts))


def _parse_part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f'{place} must be an object like {{"type": "text", "text": "Hello"}}, got {kind_of(part)}.')
    kind = _parse_text(part, "type", place)
    if kind != "text":
        raise RequestError(f"{place}.type must be 'text', got {_echo(kind)}: other parts are not supported.")
    for name in part:
        if name not in ("type", "text"):
            raise RequestError(f"{place}.{_echo(name)} is not a known field; known are type and text.")
    return _parse_text(part, "text", place)


def _echo(text: str) -> str:
    """As much of a text of any length as a message may show."""
    return ascii(text[:MAX_QUOTED_CHARS])
