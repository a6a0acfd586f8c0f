"""The body of a request as a JSON object: strictly, and at a bounded cost. Knows no field and no HTTP."""

from __future__ import annotations

import itertools
import json
import json.scanner
import math
from collections.abc import Callable
from typing import Any

from vllm_lite.errors import RequestError

MAX_INT_DIGITS = 100
"""Longer integers are no valid value of any field, and converting them costs the square of their length."""
MAX_COMMAS_FOR_C = 100_000
"""JSON with more values than this is parsed by Python's own scanner: the one in C lets no other thread run."""
MAX_ECHOED_CHARS = 2**20
"""Of prompts that an answer repeats. Each may take six bytes, in every message again."""
MAX_VALUES = 500_000
"""More than a vocabulary has tokens. Millions would take a minute and a gigabyte, and hold up every other body."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The fields, whose values are Unicode text and finite numbers. Raises RequestError."""
    fields = _parse(body)
    for name, value in fields.items():
        _check_encodable(name, value)
    return fields


def take_flag(fields: dict[str, Any], name: str, default: bool = False) -> bool:
    """Removes a field that is true or false; null means the default. Raises RequestError."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {kind_of(value)}.", name)
    return default if value is None else value


def kind_of(value: object) -> str:
    """JSON's name of a value's type: what a message may show of a value of any size."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return kinds[type(value)]


def _parse(body: bytes) -> dict[str, Any]:
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
        raise RequestError(f'the body must be a JSON object such as {{"prompt": "Hello"}}, got {kind_of(fields)}.')
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
        raise RequestError(f"{name} must be Unicode text; it holds half of a surrogate pair.", name) from error
    except RecursionError as error:
        raise RequestError(f"{name} is nested too deeply.", name) from error
    except ValueError as error:
        raise RequestError(
            f"{name} must hold finite numbers only, got NaN, an infinity or a huge number.", name
        ) from error
