"""Ways to write JSON, and how pieces that are JSON already are put together. Knows no field.

What is encoded piece by piece, as it comes, is only joined when it is wanted: nothing is encoded twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonStyle:
    """One way to write JSON. Values are encoded; arrays and objects are put together from what is JSON already."""

    encode: Callable[[Any], str]
    comma: bytes
    colon: bytes

    def value(self, value: Any) -> bytes:
        """Any value."""
        return self.encode(value).encode()

    def text(self, text: str) -> bytes:
        """A string without its quotes, so that more can be put behind it."""
        return self.value(text)[1:-1]

    def array(self, values: Iterable[bytes]) -> bytes:
        """Of values that are JSON."""
        return b"[" + self.comma.join(values) + b"]"

    def object(self, fields: Mapping[str, bytes]) -> bytes:
        """Of values that are JSON; the keys must be plain ASCII."""
        pairs = [b'"%b"%b%b' % (key.encode(), self.colon, value) for key, value in fields.items()]
        return b"{" + self.comma.join(pairs) + b"}"


COMPACT = JsonStyle(json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode, b",", b":")
"""As vLLM 0.2.7 wrote whole answers: in raw UTF-8."""
SPACED = JsonStyle(json.JSONEncoder().encode, b", ", b": ")
"""As vLLM 0.2.7 wrote messages of a stream: in ASCII."""
ESCAPED = JsonStyle(json.JSONEncoder(separators=(",", ":")).encode, b",", b":")
"""Compact and in ASCII, for streams of lines: some readers take U+2028 for the end of one."""
