"""Checks values against the keywords of JSON Schema that `/openapi.json` uses; any other keyword is an error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
ANNOTATIONS = {"default", "description", "deprecated", "title"}
BOUNDS: dict[str, Any] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
}
LENGTHS = {
    "minLength": (str, 1),
    "maxLength": (str, -1),
    "minItems": (list, 1),
    "maxItems": (list, -1),
    "maxProperties": (dict, -1),
}
OTHERS = {
    "type",
    "enum",
    "anyOf",
    "items",
    "properties",
    "required",
    "additionalProperties",
    "propertyNames",
    "pattern",
}

A_MESSAGE = {"role": "user", "content": "s"}
VALUES_OF_ALL_TYPES: list[Any] = [
    None,
    True,
    False,
    0.5,
    7,
    "x",
    [],
    {},
    [[1]],
    ["a"],
    [1],
    [True],
    {"5": 1},
    "never",
    "always",
]


def allows(schema: Any, value: Any) -> bool:
    """Whether a value is valid. As everywhere in JSON Schema, a keyword says nothing of values of other types."""
    if isinstance(schema, bool):
        return schema
    known = ANNOTATIONS | set(BOUNDS) | set(LENGTHS) | OTHERS
    assert not set(schema) - known, f"unknown keywords {set(schema) - known}"
    return (
        ("type" not in schema or any(_is(value, name) for name in _names(schema["type"])))
        and ("enum" not in schema or any(value == one and type(value) is type(one) for one in schema["enum"]))
        and ("anyOf" not in schema or any(allows(one, value) for one in schema["anyOf"]))
        and ("pattern" not in schema or not isinstance(value, str) or bool(re.search(schema["pattern"], value)))
        and all(_within(value, name, schema[name]) for name in BOUNDS if name in schema)
        and all(_fits(value, name, schema[name]) for name in LENGTHS if name in schema)
        and (not isinstance(value, list) or all(allows(schema.get("items", True), entry) for entry in value))
        and (not isinstance(value, dict) or _allows_object(schema, value))
    )


def examples(schema: dict[str, Any]) -> Iterator[Any]:
    """Values at and just beyond every bound of a schema, its levels below included."""
    is_integer = "integer" in schema.get("type", ())
    for key in ("minimum", "maximum", "exclusiveMinimum"):
        if key in schema:
            step = 1 if is_integer else 1e-9
            yield from (schema[key] - step, schema[key], schema[key] + step)
    yield from (
        "s" * (schema[key] + step) for key in ("minLength", "maxLength") if key in schema for step in (-1, 0, 1)
    )
    for choice in schema.get("anyOf", ()):
        yield from examples(choice)
    yield from schema.get("enum", ())
    if isinstance(items := schema.get("items"), dict):
        for entry in [one for one in ("s", 1, A_MESSAGE) if allows(items, one)][:1]:
            for key in ("minItems", "maxItems"):
                yield from ([entry] * max(0, schema[key] + step) for step in (-1, 0, 1) if key in schema)
            yield from ([entry, one] for one in examples(items))
    if isinstance(values := schema.get("additionalProperties"), dict):
        yield from ({str(key): 1 for key in range(schema["maxProperties"] + step)} for step in (-1, 0, 1))
        yield from ({"5": one} for one in examples(values))
        yield from ({key: 1} for key in ("0", "9" * 18, "1" + "0" * 18, "", "-1", "1.0", "a", "٣", " 1"))


def _names(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else names


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name]) and not (isinstance(value, float) and not math.isfinite(value))


def _within(value: Any, name: str, bound: Any) -> bool:
    return not _is(value, "number") or BOUNDS[name](value, bound)


def _fits(value: Any, name: str, length: int) -> bool:
    kind, sign = LENGTHS[name]
    return not isinstance(value, kind) or sign * len(value) >= sign * length


def _allows_object(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    return (
        set(schema.get("required", ())) <= set(value)
        and all(allows(schema.get("propertyNames", True), name) for name in value)
        and all(allows(properties.get(name, rest), entry) for name, entry in value.items())
    )
