"""Typed reads from what a checkpoint says about itself, JSON object or GGUF metadata. Knows no key by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_lite.config import INT32_MAX
from vllm_lite.errors import StartupError

FLOAT32_MAX = 3.4e38


class ConfigValues:
    """Wraps a mapping. A missing key and null both mean the default; a key without a default must be there.

    Raises StartupError that names the source, the key and the value.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """The value as it stands, None where there is none."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, at_most: int = INT32_MAX) -> int:
        """An integer from 1 to `at_most`."""
        value = self._values.get(key)
        if value is None:
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "an integer of at least 1")
        if value > at_most:
            raise self.wrong(key, f"at most {at_most}")
        return value

    def number(self, key: str, default: float | None = None, *, may_be_zero: bool = False) -> float:
        """A number above 0, or at least 0, that float32 can hold."""
        value = self._values.get(key)
        if value is None:
            value = default
        expected = "a number " + ("of at least 0" if may_be_zero else "above 0")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(key, expected)
        if not value >= 0 or (value == 0 and not may_be_zero):  # NaN is not
            raise self.wrong(key, expected)
        if value > FLOAT32_MAX:
            raise self.wrong(key, f"at most {FLOAT32_MAX}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number of at least 0, or None where there is none."""
        return None if self._values.get(key) is None else self.number(key, may_be_zero=True)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def ids(self, key: str) -> frozenset[int]:
        """A token id, a list of them, or nothing."""
        value = self._values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise self.wrong(key, "a token id or a list of token ids")
        return frozenset(ids)

    def wrong(self, key: str, expected: str) -> StartupError:
        """The error to raise for a key that is not what it must be."""
        if self._values.get(key) is None:
            return StartupError(f"{self.source} lacks {key!r}, which must be {expected}.")
        return StartupError(f"{self.source}: {key!r} must be {expected}, got {self._values[key]!r}.")


def read_json(path: Path) -> ConfigValues:
    """The JSON object in a file. Raises StartupError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path} is missing: a checkpoint folder needs it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"{path} must hold a JSON object, not {type(values).__name__}.")
    return ConfigValues(values, str(path))
