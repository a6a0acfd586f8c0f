"""What the OpenAPI 3.1 documents of both protocols are made of. Knows neither of them, and no HTTP.

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
    404: "The body names another model, or the path does.",
    504: "The request was not done in time (`--request-timeout-s`).",
}
EVERYWHERE = (401, 403, 503)
"""What any route may answer."""
OPEN = (403, 503)
"""Those that need no key."""


def document(about: str, paths: Schema, schemas: Schema, failure: Schema) -> Schema:
    """A whole document: a protocol's paths and schemas, and what every server has. `failure` is the body of one."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm_lite", "version": __version__, "description": about},
        "paths": {
            **paths,
            "/docs": {
                "get": get("docs", "A page for people, with a panel to try the server.", _any("text/html"), OPEN)
            },
            "/health": {
                "get": get("health", "200 exactly while the engine can serve, with an empty body.", None, OPEN)
            },
            "/metrics": {"get": get("metrics", "Prometheus text.", _any("text/plain"))},
            "/openapi.json": {"get": get("openapi", "This document.", _any("application/json"))},
        },
        "components": {"schemas": {**schemas, "Failure": failure}},
    }


def post(name: str, summary: str, request: str, answers: Schema, config: ServerConfig, *failures: int) -> Schema:
    """An operation that takes an object of the schema `request` and generates; `answers` are media types of a 200."""
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": content(request)}},
        "responses": {
            "200": {"description": "One answer, or a stream of messages.", "content": answers},
            "413": _failure(f"The body is larger than {config.max_body_mib} MiB (`--max-body-mib`)."),
            **_failures(400, 401, 403, 408, 500, 503, 504, *failures),
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


def bounded_params(config: EngineConfig) -> dict[str, Schema]:
    """`params_schemas` with the bounds that the command line sets."""
    most = dict.fromkeys(("n", "best_of"), config.max_num_seqs)
    most |= dict.fromkeys(("logprobs", "prompt_logprobs"), config.max_logprobs)
    return {
        name: schema | ({"maximum": most[name]} if name in most else {}) for name, schema in params_schemas().items()
    }


def _given(keywords: Mapping[str, Any]) -> Schema:
    return {key: value for key, value in keywords.items() if value is not None}


def list_of(*types: str) -> Schema:
    """A list of values of these types."""
    return {"type": "array", "items": {"type": list(types)}}


def object_of(properties: Schema, *required: str) -> Schema:
    """An object with no other keys than these."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def content(name: str) -> Schema:
    """A body of a named schema."""
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _failure(description: str) -> Schema:
    return {"description": description, "content": {"application/json": content("Failure")}}


def _failures(*statuses: int) -> Schema:
    return {str(status): _failure(FAILURES[status]) for status in statuses}


def get(name: str, summary: str, answers: Schema | None, failures: tuple[int, ...] = EVERYWHERE) -> Schema:
    """An operation without a body; `answers` are media types of a 200, None where that has no body."""
    ok: Schema = {"description": summary} if answers is None else {"description": summary, "content": answers}
    return {"operationId": name, "summary": summary, "responses": {"200": ok, **_failures(*failures)}}


def _any(content_type: str) -> Schema:
    return {content_type: {"schema": {}}}
