"""`GET /openapi.json`: the protocol as an OpenAPI 3.1 document, made from what the server checks. Knows no HTTP.

Types, defaults and bounds come from `SamplingParams` and the tables that its checks read, so that they cannot differ.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vllm_lite import __version__
from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.sampling_params import (
    BIAS_KEY,
    MAX_BIAS,
    MAX_LIST_ENTRIES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    RANGES,
    SamplingParams,
)

Schema = dict[str, Any]
ABOUT = "Text from a language model, over the protocol of vLLM's old native server."
STREAM_TYPE = "application/octet-stream"
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
MAX_ENTRIES = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_LIST_ENTRIES, "bad_words": MAX_LIST_ENTRIES}
MIN_ENTRIES = {"allowed_token_ids": 1}
BEAMS_ONLY = "Another value than the default only with `use_beam_search`."
NOTES = {
    "prompt": "The text to go on from.",
    "stream": "A message for each token instead of one answer. By truth in the sense of JSON and Python.",
    "details": "Token ids, logprobs and reasons beside the text.",
    "stream_deltas": "Messages carry new text alone. Only with `stream`, not in beam search nor with `best_of` > `n`.",
    "prefix_pos": "Without effect.",
    "n": "The answer has this many texts.",
    "best_of": "This many are generated, of which the best `n` are the answer. At least `n`; `null` means `n`. 1 "
    "with a `temperature` of 0, but in beam search at least 2.",
    "presence_penalty": "Taken from the logits of tokens that the answer has already.",
    "frequency_penalty": "Taken from a token's logit once for each time that the answer has it.",
    "repetition_penalty": "Above 1, tokens of the prompt and of the answer become less likely; below 1, likelier.",
    "temperature": "Below 1e-5 is greedy. 0 in beam search.",
    "top_p": "Chooses among the likeliest tokens that have this probability together. 1 in beam search.",
    "top_k": "Chooses among this many of the likeliest tokens. -1 and 0 are off. -1 in beam search.",
    "min_p": "Chooses among tokens of at least this share of the likeliest one's probability.",
    "use_beam_search": "Needs `best_of` of at least 2, `temperature` 0, `top_p` 1 and `top_k` -1.",
    "length_penalty": f"Above 1 prefers longer texts, below 1 shorter ones. {BEAMS_ONLY}",
    "early_stopping": f"When beam search ends. {BEAMS_ONLY}",
    "stop": "Strings that end the answer before them.",
    "stop_token_ids": "Ids of the vocabulary that end the answer.",
    "include_stop_str_in_output": "The text keeps the stop string, or the text of the stop id, that ended it.",
    "ignore_eos": "Goes on after the model's own end of sequence.",
    "max_tokens": "Most tokens of the answer. `null` means until the context is full.",
    "min_tokens": "Fewest tokens of the answer, but where the context is full. At most `max_tokens`.",
    "logprobs": "With `details`: the logprob of each token, and of this many of the likeliest.",
    "prompt_logprobs": "With `details`: the same for the tokens of the prompt.",
    "skip_special_tokens": "The text leaves special tokens out.",
    "spaces_between_special_tokens": "Special tokens that are shown stand between spaces.",
    "seed": "Makes the random choices of this request repeatable.",
    "logit_bias": "Numbers that are added to logits, by ids of the vocabulary.",
    "allowed_token_ids": "Ids of the vocabulary; the answer has no others.",
    "bad_words": "The answer has none of these words.",
    "truncate_prompt_tokens": "Only this many of the prompt's tokens are read, the last ones.",
}
"""What a field is for, and what its schema cannot say, since it depends on other fields or on the model. CommonMark."""
FAILURES = {
    400: "A mistake of the caller: names the field, the value and what is allowed.",
    401: "The server has a key (`--api-key`), and the request has none or another.",
    403: "A page of an origin that `--allowed-origins` does not name.",
    500: "This request failed through no fault of its caller.",
    408: "The body has not arrived in time (`--request-timeout-s`).",
    503: "The server is stopping, its engine has stopped, or too many requests wait (`--max-waiting-requests`).",
    504: "The request was not done in time (`--request-timeout-s`).",
}
EVERYWHERE = (401, 403, 503)
"""What any route may answer."""
OPEN = (403, 503)
"""Those that need no key."""


def openapi_document(engine_config: EngineConfig, config: ServerConfig) -> Schema:
    """The whole document. Bounds that the command line sets are those of this server."""
    too_large = f"The body is larger than {config.max_body_mib} MiB (`--max-body-mib`)."
    delimiter = {"null": "a null byte", "newline": "a newline"}[config.stream_delimiter]
    messages = {"type": "string", "description": f"JSON objects as in Answer, each followed by {delimiter}."}
    answers = {"application/json": _content("Answer"), STREAM_TYPE: {"schema": messages}}
    generate = {
        "operationId": "generate",
        "summary": "Goes on with a prompt: one answer, or a stream of messages with `stream: true`.",
        "requestBody": {"required": True, "content": {"application/json": _content("GenerateRequest")}},
        "responses": {
            "200": {"description": "The texts, or a stream of messages.", "content": answers},
            "413": _failure(too_large),
            **_failures(400, 401, 403, 408, 500, 503, 504),
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm_lite", "version": __version__, "description": ABOUT},
        "paths": {
            "/generate": {"post": generate},
            "/docs": {"get": _get("docs", "A page for people, with a panel to try the server.", "text/html", OPEN)},
            "/health": {
                "get": _get("health", "200 exactly while the engine can serve, with an empty body.", None, OPEN)
            },
            "/metrics": {"get": _get("metrics", "Prometheus text.", "text/plain")},
            "/openapi.json": {"get": _get("openapi", "This document.", "application/json")},
        },
        "components": {
            "schemas": {
                "GenerateRequest": request_schema(engine_config),
                "Answer": _answer_schema(),
                "Failure": _object({"detail": {"type": "string"}}, "detail"),
            }
        },
    }


def request_schema(config: EngineConfig) -> Schema:
    """Of the body of `POST /generate`. Rules between fields are told in their descriptions."""
    flags: dict[str, Schema] = {
        "prompt": {"type": "string"},
        "stream": {"default": False},
        "details": {"type": ["boolean", "null"], "default": False},
        "stream_deltas": {"type": ["boolean", "null"], "default": False},
    }
    most = dict.fromkeys(("n", "best_of"), config.max_num_seqs)
    most |= dict.fromkeys(("logprobs", "prompt_logprobs"), config.max_logprobs)
    return {
        "type": "object",
        "description": "`null` means the default of a field, but for `max_tokens`.",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": {
            **{name: {**schema, "description": NOTES[name]} for name, schema in flags.items()},
            **{
                name: schema | ({"maximum": most[name]} if name in most else {})
                for name, schema in params_schemas().items()
            },
            "prefix_pos": {"deprecated": True, "description": NOTES["prefix_pos"]},
        },
    }


def params_schemas() -> dict[str, Schema]:
    """A schema for each field of `SamplingParams`, as JSON has it: null means the default."""
    hints = typing.get_type_hints(SamplingParams)
    return {field.name: _field_schema(field, hints[field.name]) for field in dataclasses.fields(SamplingParams)}


def _field_schema(field: dataclasses.Field[Any], hint: Any) -> Schema:
    schema = _schema_of(field.name, hint)
    if "anyOf" in schema:
        schema["anyOf"].append({"type": "null"})
    elif "enum" in schema:
        schema["enum"].append(None)
    else:
        schema["type"] = [schema["type"], "null"]
    if field.name in RANGES:
        bounds = RANGES[field.name]
        keywords = {
            "minimum": bounds.minimum,
            "maximum": bounds.maximum,
            "exclusiveMinimum": bounds.exclusive_minimum,
        }
        schema |= _given(keywords)
    return {**schema, "description": NOTES[field.name], "default": field.default}


def _schema_of(name: str, hint: Any) -> Schema:
    """Of a type, without null. Raises TypeError for a kind of type that no field had when this was written."""
    if hint in JSON_TYPES:
        lengths = {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS} if hint is str else {}
        return {"type": JSON_TYPES[hint], **lengths}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        choices = [choice for choice in arguments if choice is not type(None)]
        if len(choices) == 1:
            return _schema_of(name, choices[0])
        if any(typing.get_origin(choice) is Literal for choice in choices):
            words = [word for choice in choices for word in typing.get_args(choice)]
            return {"enum": [False, True, *words]}
        return {"anyOf": [_schema_of(name, choice) for choice in choices]}
    if origin is Sequence:
        entries = {"minItems": MIN_ENTRIES.get(name), "maxItems": MAX_ENTRIES.get(name)}
        return {"type": "array", "items": _schema_of(name, arguments[0]), **_given(entries)}
    if origin is Mapping:
        return {
            "type": "object",
            "propertyNames": {"pattern": BIAS_KEY},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_LIST_ENTRIES,
        }
    raise TypeError(f"{name} has the type {hint}, which this document has no schema for.")


def _given(keywords: Mapping[str, Any]) -> Schema:
    return {key: value for key, value in keywords.items() if value is not None}


def _list_of(*types: str) -> Schema:
    return {"type": "array", "items": {"type": list(types)}}


_IDS = _list_of("integer")
_LOGPROBS = {
    "type": ["array", "null"],
    "items": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
}


def _answer_schema() -> Schema:
    """Of a whole answer and of a message of a stream. All but `text` comes with details alone."""
    once = "In whole answers and in the first message of a stream."
    details = {
        "finish_reason": {"type": "array", "items": {"enum": ["stop", "length", "abort", None]}},
        "stop_reason": _list_of("integer", "string", "null"),
        "token_ids": {"type": "array", "items": _IDS},
        "logprobs": {"type": "array", "items": _LOGPROBS},
        "cumulative_logprob": _list_of("number", "null"),
        "num_generated_tokens": {"type": "integer"},
        "prompt_token_ids": {**_IDS, "description": once},
        "prompt_logprobs": {**_LOGPROBS, "description": once},
        "num_prompt_tokens": {"type": "integer", "description": once},
    }
    return _object({"text": _list_of("string"), **details}, "text")


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _content(name: str) -> Schema:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _failure(description: str) -> Schema:
    return {"description": description, "content": {"application/json": _content("Failure")}}


def _failures(*statuses: int) -> Schema:
    return {str(status): _failure(FAILURES[status]) for status in statuses}


def _get(name: str, description: str, content_type: str | None, failures: tuple[int, ...] = EVERYWHERE) -> Schema:
    content: Schema = {} if content_type is None else {"content": {content_type: {"schema": {}}}}
    return {
        "operationId": name,
        "summary": description,
        "responses": {"200": {"description": description, **content}, **_failures(*failures)},
    }
