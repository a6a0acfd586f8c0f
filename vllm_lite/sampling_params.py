"""How the tokens of a request are chosen and when it ends: validated once, never changed. Knows no model.

Fields, order and defaults are those of vLLM 0.2.7, followed by the fields that its later releases added. A violated
rule raises `RequestError`, which is a ValueError, with a message that names the field, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_lite.errors import RequestError

GREEDY_BELOW = 1e-5
"""A temperature below this picks the likeliest token: dividing by it would overflow."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_LIST_ENTRIES = 1024
"""Most stop ids, bad words and biases of a request."""
MAX_BIAS = 100.0
BIAS_KEY = "^[0-9]{1,18}$"
"""A token id as JSON's objects have it."""
ONLY_WITH_BEAMS = "only works with beam search: set use_beam_search or leave it out."
INT32_MAX = 2**31 - 1
FIELDS_OF_REQUESTS = ("prompt", "stream", "details", "stream_deltas")
"""What a request of the native protocol may have beside these parameters."""


@dataclass(frozen=True)
class Range:
    """What a number may be: `allowed` in the words of a message, the bounds as JSON Schema has them."""

    allowed: str
    minimum: int | None = None
    maximum: int | None = None
    exclusive_minimum: int | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.exclusive_minimum is None or value > self.exclusive_minimum)
        )


RANGES = {
    "n": Range("at least 1", 1),
    "best_of": Range("at least 1", 1),
    "presence_penalty": Range("in [-2, 2]", -2, 2),
    "frequency_penalty": Range("in [-2, 2]", -2, 2),
    "repetition_penalty": Range("greater than zero", exclusive_minimum=0),
    "temperature": Range("non-negative", 0),
    "top_p": Range("in (0, 1]", maximum=1, exclusive_minimum=0),
    "top_k": Range("-1 or 0 (off), or at least 1", -1),
    "min_p": Range("in [0, 1]", 0, 1),
    "max_tokens": Range("at least 1", 1),
    "min_tokens": Range("at least 0", 0),
    "logprobs": Range("at least 0", 0),
    "prompt_logprobs": Range("at least 0", 0),
    "seed": Range("within int64", -(2**63), 2**63 - 1),
    "truncate_prompt_tokens": Range("at least 1", 1),
}
"""Of fields that have bounds of their own, whatever the other fields and the server are."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling fields of one request. Raises RequestError from the constructor."""

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_candidates()
        self._check_lists()

    @classmethod
    def from_request(cls, fields: Mapping[str, Any], known: Sequence[str] | None = None) -> SamplingParams:
        """Builds the parameters from the JSON fields of a request; null means the default of an optional field.

        `max_tokens` alone takes null as a value: until the context is full. `known` are all fields that a request may
        have, those taken out of it before included; None means those of the native protocol.
        """
        own = sorted(field.name for field in dataclasses.fields(cls))
        if known is None:
            known = [*FIELDS_OF_REQUESTS, *own]
        given: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in own or name not in known:
                raise RequestError(_unknown_field(name, known), name)
            if value is not None or name == "max_tokens":
                given[name] = value
        if "logit_bias" in given:
            given["logit_bias"] = _bias_with_integer_keys(given["logit_bias"])
        return cls(**given)

    @property
    def num_candidates(self) -> int:
        """How many sequences are generated, of which the best `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; top_p, top_k and min_p are then without effect."""
        return self.temperature < GREEDY_BELOW

    @property
    def effective_top_k(self) -> int:
        """top_k within int32, 0 for off."""
        return min(max(self.top_k, 0), INT32_MAX)

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token needs to know the tokens before it."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set."""
        return frozenset(self.stop_token_ids or ())

    def check_limits(self, *, vocab_size: int, max_num_seqs: int, max_logprobs: int) -> None:
        """Checks what depends on the server: numbers of sequences and logprobs, and ids against the vocabulary."""
        for name, count in (("n", self.n), ("best_of", self.num_candidates)):
            if count > max_num_seqs:
                raise RequestError(f"{name} must be at most {max_num_seqs} (--max-num-seqs), got {_show(count)}.", name)
        for name, count in (("logprobs", self.logprobs or 0), ("prompt_logprobs", self.prompt_logprobs or 0)):
            if count > max_logprobs:
                raise RequestError(f"{name} must be at most {max_logprobs} (--max-logprobs), got {_show(count)}.", name)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise RequestError(f"{name} must hold ids from 0 to {vocab_size - 1}, got {_show(token_id)}.", name)

    def _check_types(self) -> None:
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {_show(getattr(self, name))}.", name)
        for name in _INTS:
            value = getattr(self, name)
            if not _is_int(value) and not (value is None and name in _OPTIONAL_INTS):
                raise RequestError(f"{name} must be an integer, got {_show(value)}.", name)
        for name in _FLOATS:
            if not _is_finite(getattr(self, name)):
                raise RequestError(f"{name} must be a finite number, got {_show(getattr(self, name))}.", name)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            got = _show(self.early_stopping)
            raise RequestError(f'early_stopping must be true, false or "never", got {got}.', "early_stopping")

    def _check_ranges(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            _require(value is None or value in allowed, name, allowed.allowed, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens={_show(self.max_tokens)}"
            _require(False, "min_tokens", limit, self.min_tokens)

    def _check_candidates(self) -> None:
        if self.num_candidates < self.n:
            got = f"n={_show(self.n)} and best_of={_show(self.best_of)}"
            raise RequestError(f"best_of must be greater than or equal to n, got {got}.", "best_of")
        if self.use_beam_search:
            if self.num_candidates < 2:
                got = str(self.num_candidates)
                raise RequestError(f"best_of must be greater than 1 when using beam search, got {got}.", "best_of")
            for name, value in (("temperature", 0), ("top_p", 1), ("top_k", -1)):
                if not (self.is_greedy if name == "temperature" else getattr(self, name) == value):
                    got = _show(getattr(self, name))
                    raise RequestError(f"{name} must be {value} when using beam search, got {got}.", name)
            return
        if self.early_stopping is not False:
            raise RequestError(f"early_stopping {ONLY_WITH_BEAMS}", "early_stopping")
        if self.length_penalty != 1:
            raise RequestError(f"length_penalty {ONLY_WITH_BEAMS}", "length_penalty")
        if self.is_greedy and self.num_candidates > 1:
            got = _show(self.num_candidates)
            raise RequestError(
                f"best_of must be 1 when using greedy sampling (n and best_of alike), got {got}.",
                "n" if self.best_of is None else "best_of",
            )

    def _check_lists(self) -> None:
        if not isinstance(self.stop, str):
            _check_list("stop", self.stop, str, MAX_STOP_STRINGS)
        for text in self.stop_strings:
            _require(0 < len(text) <= MAX_STOP_STRING_CHARS, "stop", _STRING_LENGTHS, text)
        _check_list("stop_token_ids", self.stop_token_ids, int, MAX_LIST_ENTRIES)
        _check_list("allowed_token_ids", self.allowed_token_ids, int, None)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must hold at least one id, got an empty list.", "allowed_token_ids")
        _check_list("bad_words", self.bad_words, str, MAX_LIST_ENTRIES)
        for word in self.bad_words or ():
            _require(0 < len(word) <= MAX_STOP_STRING_CHARS, "bad_words", _STRING_LENGTHS, word)
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)


_BOOLS = (
    "use_beam_search",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_OPTIONAL_INTS = ("best_of", "max_tokens", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens")
_INTS = ("n", "top_k", "min_tokens", *_OPTIONAL_INTS)
_FLOATS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
    "length_penalty",
)
_STRING_LENGTHS = f"strings of 1 to {MAX_STOP_STRING_CHARS} characters"


def _is_int(value: object) -> bool:
    """JSON's true is not an integer, though Python's is."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


class _ShortRepr(reprlib.Repr):
    """Looks at no more of a value than it shows: a caller may send megabytes of a wrong type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Without the sorting of the base class where there is much to sort."""
        return super().repr_dict(x, level) if len(x) <= self.maxdict else f"{{... {len(x)} keys}}"


_show = _ShortRepr().repr
"""The value as it may stand in a message: short, whatever the caller sent."""


def _require(condition: bool, name: str, allowed: str, value: object) -> None:
    if not condition:
        raise RequestError(f"{name} must be {allowed}, got {_show(value)}.", name)


def _check_list(name: str, values: object, kind: type, most: int | None) -> None:
    if values is None:
        return
    noun = "strings" if kind is str else "token ids"
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise RequestError(f"{name} must be a list of {noun}, got {_show(values)}.", name)
    if most is not None and len(values) > most:
        raise RequestError(f"{name} must have at most {most} entries, got {len(values)}.", name)
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(f"{name} must be a list of {noun}, got {_show(value)} in it.", name)


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must be an object of token ids and numbers, got {_show(bias)}.", "logit_bias")
    if len(bias) > MAX_LIST_ENTRIES:
        raise RequestError(f"logit_bias must have at most {MAX_LIST_ENTRIES} entries, got {len(bias)}.", "logit_bias")
    for token_id, value in bias.items():
        if not _is_int(token_id):
            raise RequestError(f"logit_bias must have token ids as keys, got {_show(token_id)}.", "logit_bias")
        if not _is_finite(value) or not -MAX_BIAS <= value <= MAX_BIAS:
            raise RequestError(
                f"logit_bias must have values in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {_show(value)}.", "logit_bias"
            )


def _bias_with_integer_keys(bias: object) -> object:
    """JSON has only strings as keys; whatever is not an id stays as it is and is refused by the constructor."""
    if not isinstance(bias, Mapping):
        return bias
    return {
        int(key) if isinstance(key, str) and re.fullmatch(BIAS_KEY, key) else key: value for key, value in bias.items()
    }


def _unknown_field(name: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name[:100], names, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "."
    allowed = ", ".join(names)
    return f"{_show(name)} is not a known field{hint} Allowed are: {allowed}."
