"""The body of `POST /generate`: bytes to a checked request, strictly, whatever its Content-Type. Knows no HTTP."""

from __future__ import annotations

import itertools
import json
import json.scanner
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams

MAX_INT_DIGITS = 100
"""Longer integers are no valid value of any field, and converting them costs the square of their length."""
MAX_COMMAS_FOR_C = 100_000
"""JSON with more values than this is parsed by Python's own scanner: the one in C lets no other thread run."""
MAX_ECHOED_CHARS = 2**20
"""Of prompts in an answer. Each may take six bytes, in every message again."""
MAX_VALUES = 500_000
"""More than a vocabulary has tokens. Millions would take a minute and a gigabyte, and hold up every other body."""


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
    fields = _parse_object(body)
    for name, value in fields.items():
        _check_encodable(name, value)
    prompt = _take_prompt(fields)
    is_stream = bool(fields.pop("stream", None))
    fields.pop("prefix_pos", None)  # clients of vLLM 0.3.0 to 0.3.3 send it
    has_details, is_deltas = _take_flag(fields, "details"), _take_flag(fields, "stream_deltas")
    params = SamplingParams.from_request(fields)
    if params.n * len(prompt) > MAX_ECHOED_CHARS and params.n > 1:
        raise RequestError(
            f"n must be at most {max(1, MAX_ECHOED_CHARS // len(prompt))} for a prompt of {len(prompt)} characters, "
            f"got {params.n}: every answer and message repeats the prompt n times."
        )
    if is_deltas:
        _check_deltas(is_stream, params)
    return GenerateRequest(prompt, is_stream, has_details, is_deltas, params)


def _take_flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {_kind(value)}.")
    return bool(value)


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


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8-sig")
        fields = _decoder_for(text).decode(text)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body must be JSON in UTF-8; byte {error.start} is not UTF-8.") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body must be a JSON object; it is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply.") from error
    if not isinstance(fields, dict):
        raise RequestError(f'the body must be a JSON object such as {{"prompt": "Hello"}}, got {_kind(fields)}.')
    return fields


def _decoder_for(text: str) -> json.JSONDecoder:
    decoder = json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float)
    if text.count(",") > MAX_COMMAS_FOR_C:
        _limit_values(decoder)
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined,unused-ignore]
    return decoder


def _limit_values(decoder: Any) -> None:
    """Has arrays and objects count what they hold, all of them together; for Python's own scanner."""
    parse_array, parse_object = decoder.parse_array, decoder.parse_object
    counter = itertools.count(1)

    def counted(scan_once: Callable[[str, int], Any]) -> Callable[[str, int], Any]:
        def scan(text: str, index: int) -> Any:
            if next(counter) > MAX_VALUES:
                raise RequestError(f"the body must hold at most {MAX_VALUES} values.")
            return scan_once(text, index)

        return scan

    decoder.parse_array = lambda state, scan: parse_array(state, counted(scan))
    decoder.parse_object = lambda state, strict, scan, *rest: parse_object(state, strict, counted(scan), *rest)


def _parse_int(digits: str) -> int | float:
    """An integer that is too long becomes infinity, which is refused in the name of its field."""
    return int(digits) if len(digits) <= MAX_INT_DIGITS and digits.isascii() else math.inf


def _parse_float(digits: str) -> float:
    return float(digits) if digits.isascii() else math.nan


def _check_encodable(name: str, value: Any) -> None:
    """Python's JSON reader takes more than JSON has: NaN, infinities and halves of surrogate pairs."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{ascii(name)[:100]} is not a known field.") from error
    try:
        if isinstance(value, str):
            value.encode()
        else:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} must be Unicode text; it holds half of a surrogate pair.") from error
    except RecursionError as error:
        raise RequestError(f"{name} is nested too deeply.") from error
    except ValueError as error:
        raise RequestError(f"{name} must hold finite numbers only, got NaN, an infinity or a huge number.") from error


def _take_prompt(fields: dict[str, Any]) -> str:
    if "prompt" not in fields:
        raise RequestError('prompt is missing; it must be a string, as in {"prompt": "Hello"}.')
    prompt = fields.pop("prompt")
    if isinstance(prompt, list):
        raise RequestError("prompt must be a string; lists of prompts are not supported: send one request per prompt.")
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be a string, got {_kind(prompt)}.")
    return prompt


def _kind(value: object) -> str:
    """JSON's name of a value's type: what a message may show of a value of any size."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return kinds[type(value)]
