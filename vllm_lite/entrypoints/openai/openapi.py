"""`GET /openapi.json` of OpenAI's protocol as it is served here, made from what the checks read. Knows no HTTP."""

from __future__ import annotations

from typing import Any

from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.openai.asked import PARAMS, STREAM_OPTIONS, WITHOUT_EFFECT
from vllm_lite.entrypoints.openai.chat_messages import NOT_SUPPORTED
from vllm_lite.entrypoints.openai.chat_request import HARMLESS
from vllm_lite.entrypoints.openai.chat_request import REFUSED as REFUSED_IN_CHATS
from vllm_lite.entrypoints.openai.completion_answer import LOGPROB_KEYS
from vllm_lite.entrypoints.openai.completion_request import REFUSED
from vllm_lite.entrypoints.openai.events import EVENT_TYPE
from vllm_lite.entrypoints.openapi_parts import (
    Schema,
    bounded_params,
    content,
    document,
    get,
    list_of,
    object_of,
    post,
)

ABOUT = "Text from a language model, over OpenAI's protocol."
FLAG: Schema = {"type": ["boolean", "null"]}
STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
REASON: Schema = {"enum": ["stop", "length", None]}
IDS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
TOKEN: Schema = {"token": STRING, "logprob": {"type": "number"}, "bytes": {"type": ["array", "null"], "items": COUNT}}


def openai_document(engine_config: EngineConfig, config: ServerConfig) -> Schema:
    """The whole document. Bounds that the command line sets are those of this server."""
    events = {"schema": {**STRING, "description": "Server-sent events: chunks as JSON, then [DONE]."}}

    def generates(name: str, summary: str, kind: str) -> Schema:
        answers = {"application/json": content(kind), EVENT_TYPE: events}
        return {"post": post(name, summary, f"{kind}Request", answers, config, 404)}

    one_model = get(
        "retrieve_model", "One name of the model.", {"application/json": content("Model")}, (401, 403, 404, 503)
    )
    name = {"name": "name", "in": "path", "required": True, "schema": STRING}
    return document(
        ABOUT,
        {
            "/v1/completions": generates("completions", "Goes on with prompts.", "Completion"),
            "/v1/chat/completions": generates("chat_completions", "Answers in a chat.", "ChatCompletion"),
            "/v1/models": {"get": get("models", "The model.", {"application/json": content("Models")})},
            "/v1/models/{name}": {"get": {**one_model, "parameters": [name]}},
        },
        {
            "CompletionRequest": completion_schema(engine_config, config),
            "Completion": _answer_schema("text_completion", {"text": STRING, "logprobs": _completion_logprobs()}),
            "ChatCompletionRequest": chat_schema(engine_config),
            "ChatCompletion": _answer_schema("chat.completion", {"message": _message(), "logprobs": _chat_logprobs()}),
            "Model": _model_schema(),
            "Models": object_of(
                {
                    "object": {"enum": ["list"]},
                    "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
                },
                "object",
                "data",
            ),
        },
        _failure_schema(),
    )


def completion_schema(engine_config: EngineConfig, config: ServerConfig) -> Schema:
    """Of the body of `POST /v1/completions`. Rules between fields are told in their descriptions."""
    one = {"anyOf": [STRING, IDS]}
    prompts = {"type": "array", "items": one, "minItems": 1, "maxItems": config.max_waiting_requests}
    params = bounded_params(engine_config)
    params["max_tokens"] = {**params["max_tokens"], "minimum": 0, "description": "null means 16; 0 only with echo."}
    params["logprobs"] = {**params["logprobs"], "description": "The logprobs of the tokens and of this many others."}
    fields = {
        "prompt": {"anyOf": [STRING, IDS, prompts], "description": "Text or token ids, or a list of several."},
        "echo": {**FLAG, "default": False, "description": "Each choice begins with its prompt."},
        "add_special_tokens": {**FLAG, "default": True, "description": "As BOS; for prompts that are text."},
    }
    return _request_schema("prompt", fields, params, _refused(REFUSED, {"suffix": ("",)}))


def chat_schema(engine_config: EngineConfig) -> Schema:
    """Of the body of `POST /v1/chat/completions`."""
    params = bounded_params(engine_config)
    params["max_tokens"] = {**params["max_tokens"], "default": None}
    top = {**params["logprobs"], "description": "Only with logprobs."}
    params["logprobs"] = {**FLAG, "default": False, "description": "The logprob of each token of the answer."}
    text_part = object_of({"type": {"enum": ["text"]}, "text": STRING}, "type", "text")
    message = object_of(
        {
            "role": STRING,
            "content": {"anyOf": [STRING, {"type": "array", "items": text_part}]},
            "name": {"type": ["string", "null"]},
            **{name: {"enum": [None, []], "description": f"{reason}."} for name, reason in NOT_SUPPORTED.items()},
        },
        "role",
        "content",
    )
    fields = {
        "messages": {"type": "array", "items": message, "minItems": 1, "description": "The chat so far, oldest first."},
        "max_completion_tokens": {**params["max_tokens"], "description": "Goes before max_tokens."},
        "top_logprobs": top,
        "add_generation_prompt": {**FLAG, "default": True, "description": "The assistant's next message begins."},
        "continue_final_message": {**FLAG, "default": False, "description": "Only without add_generation_prompt."},
        "chat_template_kwargs": {"type": ["object", "null"], "description": "Variables for the chat template."},
    }
    return _request_schema("messages", fields, params, _refused(REFUSED_IN_CHATS, HARMLESS))


def _request_schema(required: str, fields: Schema, params: Schema, refused: Schema) -> Schema:
    options = {**object_of(dict.fromkeys(STREAM_OPTIONS, FLAG)), "type": ["object", "null"]}
    return {
        "type": "object",
        "required": [required],
        "additionalProperties": False,
        "properties": {
            "model": {"type": ["string", "null"], "description": "null means the one there is."},
            **fields,
            "stream": {**FLAG, "default": False, "description": "Server-sent events instead of one answer."},
            "stream_options": {**options, "description": "Only with stream."},
            **{name: params[name] for name in PARAMS},
            **{name: {"description": "Without effect."} for name in WITHOUT_EFFECT},
            **refused,
        },
    }


def _refused(reasons: dict[str, str], harmless: dict[str, tuple[Any, ...]]) -> Schema:
    return {
        name: {"enum": [None, *harmless.get(name, ())], "description": f"Not supported: {reason}."}
        for name, reason in reasons.items()
    }


def _answer_schema(kind: str, choice: Schema) -> Schema:
    choices = object_of({"index": COUNT, **choice, "finish_reason": REASON}, "index", *choice, "finish_reason")
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    fields: Schema = {
        "id": STRING,
        "object": {"enum": [kind]},
        "created": COUNT,
        "model": STRING,
        "choices": {"type": "array", "items": choices},
        "usage": object_of(dict.fromkeys(counts, COUNT), *counts),
    }
    return object_of(fields, *fields)


def _completion_logprobs() -> Schema:
    top = {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
    kinds: dict[str, Schema] = {
        "tokens": list_of("string"),
        "token_logprobs": {"type": "array", "items": NUMBER_OR_NULL},
        "top_logprobs": {"type": "array", "items": top},
        "text_offset": list_of("integer"),
    }
    return {**object_of({key: kinds[key] for key in LOGPROB_KEYS}, *LOGPROB_KEYS), "type": ["object", "null"]}


def _chat_logprobs() -> Schema:
    top = {"type": "array", "items": object_of(TOKEN, *TOKEN)}
    entry = object_of({**TOKEN, "top_logprobs": top}, *TOKEN, "top_logprobs")
    fields: Schema = {"content": {"type": "array", "items": entry}, "refusal": {"type": "null"}}
    return {**object_of(fields, *fields), "type": ["object", "null"]}


def _message() -> Schema:
    fields: Schema = {"role": {"enum": ["assistant"]}, "content": STRING, "refusal": {"type": "null"}}
    return object_of(fields, *fields)


def _model_schema() -> Schema:
    fields: Schema = {
        "id": STRING,
        "object": {"enum": ["model"]},
        "created": COUNT,
        "owned_by": STRING,
        "root": STRING,
        "max_model_len": COUNT,
    }
    return object_of(fields, *fields)


def _failure_schema() -> Schema:
    word: Schema = {"type": ["string", "null"]}
    fields: Schema = {"message": STRING, "type": STRING, "param": word, "code": word}
    return object_of({"error": object_of(fields, *fields)}, "error")
