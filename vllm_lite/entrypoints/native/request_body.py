"""The body of `POST /generate`: bytes to a checked request, strictly, whatever its Content-Type. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_lite.entrypoints.json_body import MAX_ECHOED_CHARS, kind_of, parse_object, take_flag
from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """What a client asked for."""

    prompt: str
    is_stream: bool
    has_details: bool
    """Whether the answer has more than text."""
    is_deltas: bool
    """Whether messages of a stream have only what is new."""
    params: SamplingParams


def parse_generate_request(body: bytes) -> GenerateRequest:
    """Raises RequestError that names the field where there is one."""
    fields = parse_object(body)
    prompt = _take_prompt(fields)
    is_stream = bool(fields.pop("stream", None))
    fields.pop("prefix_pos", None)  # clients of vLLM 0.3.0 to 0.3.3 send it
    has_details, is_deltas = take_flag(fields, "details"), take_flag(fields, "stream_deltas")
    params = SamplingParams.from_request(fields)
    if params.n * len(prompt) > MAX_ECHOED_CHARS and params.n > 1:
        raise RequestError(
            f"n must be at most {max(1, MAX_ECHOED_CHARS // len(prompt))} for a prompt of {len(prompt)} characters, "
            f"got {params.n}: every answer and message repeats the prompt n times."
        )
    if is_deltas:
        _check_deltas(is_stream, params)
    return GenerateRequest(prompt, is_stream, has_details, is_deltas, params)


def _check_deltas(is_stream: bool, params: SamplingParams) -> None:
    """New text alone makes sense where it is certain whom it belongs to."""
    if not is_stream:
        raise RequestError('stream_deltas must come with "stream": true.')
    if params.use_beam_search:
        raise RequestError("stream_deltas must be false in beam search, which changes its mind about earlier tokens.")
    if params.num_candidates > params.n:
        raise RequestError(
            f"stream_deltas must be false where best_of is greater than n, got n={params.n} and "
            f"best_of={params.best_of}: which candidates are the best is known at the end."
        )


def _take_prompt(fields: dict[str, Any]) -> str:
    if "prompt" not in fields:
        raise RequestError('prompt is missing; it must be a string, as in {"prompt": "Hello"}.')
    prompt = fields.pop("prompt")
    if isinstance(prompt, list):
        raise RequestError("prompt must be a string; lists of prompts are not supported: send one request per prompt.")
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be a string, got {kind_of(prompt)}.")
    return prompt
