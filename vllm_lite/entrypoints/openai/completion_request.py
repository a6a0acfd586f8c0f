"""The body of `POST /v1/completions`: bytes to a checked request. Knows no HTTP and no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_lite.entrypoints.json_body import MAX_ECHOED_CHARS, kind_of, parse_object, take_flag
from vllm_lite.entrypoints.openai.asked import (
    PARAMS,
    WITHOUT_EFFECT,
    Asked,
    check_stream,
    drop_without_effect,
    refuse,
    take_model,
    take_stream,
)
from vllm_lite.entrypoints.request_service import Prompt
from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams

REFUSED = {
    "suffix": "text is not inserted between a prompt and a suffix",
    "prompt_logprobs": "the logprobs of a prompt come with echo and logprobs",
}
FIELDS = ("model", "prompt", "stream", "stream_options", "echo", "add_special_tokens", *PARAMS, *WITHOUT_EFFECT)
PROMPT_KINDS = "a string, a list of strings, a list of token ids or a list of such lists"


@dataclass(frozen=True)
class CompletionRequest(Asked):
    """What a client asked for."""

    has_echo: bool
    """Whether each choice begins with its prompt."""
    has_output: bool
    """Whether anything follows on the prompt: with echo, `max_tokens` may be 0."""


def parse_completion_request(body: bytes, max_prompts: int) -> CompletionRequest:
    """Raises RequestError that names the field where there is one."""
    fields = parse_object(body)
    model, stream = take_model(fields), take_stream(fields)
    has_echo, adds_special = take_flag(fields, "echo"), take_flag(fields, "add_special_tokens", default=True)
    prompts = _take_prompts(fields, max_prompts, adds_special)
    refuse(fields, REFUSED, {"suffix": ("",)})
    drop_without_effect(fields)
    max_tokens = fields.pop("max_tokens", None)
    has_output = not (has_echo and _is_id(max_tokens) and max_tokens == 0)
    if max_tokens is not None:  # the engine has no request without a token: this one will not be shown
        fields["max_tokens"] = max_tokens if has_output else 1
    params = SamplingParams.from_request(fields, FIELDS)
    if has_echo:
        params = replace(params, prompt_logprobs=params.logprobs)
    if stream is not None:
        check_stream(params)
    _check_number(prompts, params, max_prompts)
    if has_echo:
        _check_echo(prompts, params)
    return CompletionRequest(model, prompts, params, stream, {}, has_echo, has_output)


def _check_number(prompts: Sequence[Prompt], params: SamplingParams, most: int) -> None:
    """All candidates of a list are kept until the last prompt is done."""
    if len(prompts) > 1 and len(prompts) * params.num_candidates > most:
        raise RequestError(
            f"prompt must be a list of at most {most // params.num_candidates} prompts (--max-waiting-requests) with "
            f"{params.num_candidates} candidates for each, got {len(prompts)}.",
            "prompt",
        )


def _check_echo(prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """Each of the choices repeats its prompt, with as many logprobs for each token."""
    size = sum(len(prompt.text or prompt.token_ids or ()) for prompt in prompts) * (2 + (params.logprobs or 0))
    if params.n * size <= MAX_ECHOED_CHARS:
        return
    if params.n > 1:
        raise RequestError(
            f"n must be at most {max(1, MAX_ECHOED_CHARS // size)} with echo of so long a prompt, got {params.n}: "
            "every choice repeats it.",
            "n",
        )
    if len(prompts) > 1:
        raise RequestError(
            f"prompt must be a list of at most {MAX_ECHOED_CHARS} characters or ids with echo, times 2 plus logprobs, "
            f"got {size}: an answer repeats all.",
            "prompt",
        )


def _take_prompts(fields: dict[str, Any], max_prompts: int, adds_special: bool) -> tuple[Prompt, ...]:
    if "prompt" not in fields:
        raise RequestError(f"prompt is missing; it must be {PROMPT_KINDS}.", "prompt")
    value = fields.pop("prompt")
    if isinstance(value, str):
        return (Prompt(value, add_special_tokens=adds_special),)
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else kind_of(value)
        raise RequestError(f"prompt must be {PROMPT_KINDS}, got {got}.", "prompt")
    if _is_id(value[0]):
        return (_ids_prompt(value, "prompt"),)
    if len(value) > max_prompts:
        raise RequestError(
            f"prompt must be a list of at most {max_prompts} prompts (--max-waiting-requests), got {len(value)}.",
            "prompt",
        )
    return tuple(_one_of_many(one, f"prompt[{index}]", adds_special) for index, one in enumerate(value))


def _one_of_many(value: Any, place: str, adds_special: bool) -> Prompt:
    if isinstance(value, str):
        return Prompt(value, add_special_tokens=adds_special)
    if isinstance(value, list):
        return _ids_prompt(value, place)
    raise RequestError(f"{place} must be a string or a list of token ids, got {kind_of(value)}.", "prompt")


def _ids_prompt(ids: list[Any], place: str) -> Prompt:
    if not ids:
        raise RequestError(f"{place} must have at least one token, got an empty list.", "prompt")
    for token_id in ids:
        if not _is_id(token_id):
            raise RequestError(f"{place} must be a list of token ids, got {kind_of(token_id)} in it.", "prompt")
    return Prompt(None, tuple(ids))


def _is_id(value: Any) -> bool:
    """JSON's true is not an integer, though Python's is."""
    return isinstance(value, int) and not isinstance(value, bool)
