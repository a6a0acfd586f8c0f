"""`GET /openapi.json` of the native protocol, made from what the server checks. Knows no HTTP."""

from __future__ import annotations

from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.openapi_parts import (
    NOTES,
    Schema,
    bounded_params,
    content,
    document,
    list_of,
    object_of,
    post,
)

ABOUT = "Text from a language model, over the protocol of vLLM's old native server."
STREAM_TYPE = "application/octet-stream"


def openapi_document(engine_config: EngineConfig, config: ServerConfig) -> Schema:
    """The whole document. Bounds that the command line sets are those of this server."""
    delimiter = {"null": "a null byte", "newline": "a newline"}[config.stream_delimiter]
    messages = {"type": "string", "description": f"JSON objects as in Answer, each followed by {delimiter}."}
    answers = {"application/json": content("Answer"), STREAM_TYPE: {"schema": messages}}
    summary = "Goes on with a prompt: one answer, or a stream of messages with `stream: true`."
    return document(
        ABOUT,
        {"/generate": {"post": post("generate", summary, "GenerateRequest", answers, config)}},
        {"GenerateRequest": request_schema(engine_config), "Answer": _answer_schema()},
        object_of({"detail": {"type": "string"}}, "detail"),
    )


def request_schema(config: EngineConfig) -> Schema:
    """Of the body of `POST /generate`. Rules between fields are told in their descriptions."""
    flags: dict[str, Schema] = {
        "prompt": {"type": "string"},
        "stream": {"default": False},
        "details": {"type": ["boolean", "null"], "default": False},
        "stream_deltas": {"type": ["boolean", "null"], "default": False},
    }
    return {
        "type": "object",
        "description": "`null` means the default of a field, but for `max_tokens`.",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": {
            **{name: {**schema, "description": NOTES[name]} for name, schema in flags.items()},
            **bounded_params(config),
            "prefix_pos": {"deprecated": True, "description": NOTES["prefix_pos"]},
        },
    }


_IDS = list_of("integer")
_LOGPROBS = {
    "type": ["array", "null"],
    "items": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
}


def _answer_schema() -> Schema:
    """Of a whole answer and of a message of a stream. All but `text` comes with details alone."""
    once = "In whole answers and in the first message of a stream."
    details = {
        "finish_reason": {"type": "array", "items": {"enum": ["stop", "length", "abort", None]}},
        "stop_reason": list_of("integer", "string", "null"),
        "token_ids": {"type": "array", "items": _IDS},
        "logprobs": {"type": "array", "items": _LOGPROBS},
        "cumulative_logprob": list_of("number", "null"),
        "num_generated_tokens": {"type": "integer"},
        "prompt_token_ids": {**_IDS, "description": once},
        "prompt_logprobs": {**_LOGPROBS, "description": once},
        "num_prompt_tokens": {"type": "integer", "description": once},
    }
    return object_of({"text": list_of("string"), **details}, "text")
