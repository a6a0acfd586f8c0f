"""What a request of either endpoint asks of the engine, and how its fields are read. Knows no HTTP and no endpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_lite.entrypoints.json_body import kind_of, take_flag
from vllm_lite.entrypoints.request_service import Prompt
from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams

PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "prompt_logprobs")
"""The fields of `SamplingParams` that a client may send under their own names."""
WITHOUT_EFFECT = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
"""Fields that may have any value: they ask for nothing that changes an answer here."""
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""The last is without effect, too."""


@dataclass(frozen=True)
class StreamOptions:
    """Which messages of a stream tell numbers of tokens."""

    has_usage: bool = False
    """Whether one with them comes at the end."""
    has_running_usage: bool = False
    """Whether all have them, as far as they are known."""


@dataclass(frozen=True)
class Asked:
    """What either endpoint asks of the engine."""

    model: str | None
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    stream: StreamOptions | None
    """None for a whole answer."""
    field_names: Mapping[str, str]
    """What the client calls a parameter, or the prompt, where that is not our name of it."""


def as_client_names(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the client's name of the field instead of ours, which its message begins with."""
    name = names.get(error.param or "")
    if name is None:
        return error
    return RequestError(name + str(error).removeprefix(error.param or ""), name)


def take_model(fields: dict[str, Any]) -> str | None:
    """Which model is asked; None means the one there is."""
    model = fields.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise RequestError(f"model must be a string, got {kind_of(model)}.", "model")
    return model


def take_stream(fields: dict[str, Any]) -> StreamOptions | None:
    """`stream` and `stream_options`."""
    is_stream, options = take_flag(fields, "stream"), fields.pop("stream_options", None)
    if options is None:
        return StreamOptions() if is_stream else None
    if not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object, got {kind_of(options)}.", "stream_options")
    if not is_stream:
        raise RequestError('stream_options must come with "stream": true.', "stream_options")
    for name, value in options.items():
        if name not in STREAM_OPTIONS:
            allowed = ", ".join(STREAM_OPTIONS)
            raise RequestError(f"stream_options must have no key {name[:80]!r}; known are {allowed}.", "stream_options")
        if not (value is None or isinstance(value, bool)):
            raise RequestError(f"stream_options.{name} must be true or false, got {kind_of(value)}.", "stream_options")
    return StreamOptions(bool(options.get("include_usage")), bool(options.get("continuous_usage_stats")))


def drop_without_effect(fields: dict[str, Any]) -> None:
    """Forgets what may be there and changes nothing."""
    for name in WITHOUT_EFFECT:
        fields.pop(name, None)


def refuse(fields: dict[str, Any], refused: Mapping[str, str], harmless: Mapping[str, Collection[Any]]) -> None:
    """Takes out fields of OpenAI's that are not supported, with the reason; null and `harmless` values may be there."""
    for name, reason in refused.items():
        value = fields.pop(name, None)
        if value is not None and value not in harmless.get(name, ()):
            raise RequestError(f"{name} must be left out: {reason}.", name)


def check_stream(params: SamplingParams) -> None:
    """New text alone makes sense where it is certain whom it belongs to. Raises RequestError."""
    if params.use_beam_search:
        raise RequestError(
            "use_beam_search must be false in a stream: beams change their minds about earlier tokens.",
            "use_beam_search",
        )
    if params.num_candidates > params.n:
        raise RequestError(
            f"best_of must not be greater than n in a stream, got n={params.n} and best_of={params.best_of}: which "
            "candidates are the best is known at the end.",
            "best_of",
        )
