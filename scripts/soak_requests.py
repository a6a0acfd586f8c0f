"""What the soak asks and how its clients behave, all of it from a seed. Knows neither sockets nor what is right.

The pool is a number of distinct requests, which are asked over and over; a visit is one of them with a way to behave.
A visit depends on the seed and its number alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from scripts.fuzz_cases import BROKEN_JSON

Shape = Literal["single", "candidates", "beams"]
Way = Literal[
    "read",
    "read slowly",
    "leave the stream",
    "leave before the answer",
    "leave in the body",
    "stop reading",
    "half-close",
    "malformed",
    "too long",
    "too large",
    "other route",
]
WAYS: dict[Way, float] = {
    "read": 66,
    "read slowly": 3,
    "leave the stream": 8,
    "leave before the answer": 6,
    "leave in the body": 2,
    "stop reading": 0.5,
    "half-close": 2,
    "malformed": 6,
    "too long": 0.5,
    "too large": 1,
    "other route": 5,
}
"""How often clients behave so."""
MAX_BODY_MIB = 1
WORDS = ["the", "a", "of", "light", "river", "stone", "seven", "ghosts", "because", "é", "你好", "😀", "\n", "never"]
WORDS += ["quietly", "returned,", "home.", "Why?", "42", "x=y"]
SYSTEM = "You are a careful clerk of a small harbour and answer briefly. "
"""Prompts that begin with it share blocks."""

_BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"max_tokens": -1},
    {"n": 2, "temperature": 0},
    {"top_p": 0},
    {"no_such_field": 1},
    {"prompt": ["a", "b"]},
    {"prompt": ""},
    {"logprobs": 10**6},
]
BAD_BODIES = [json.dumps({"prompt": "a", **bad}).encode() for bad in _BAD_FIELDS]
"""Well-formed JSON that must be refused."""
TOO_LONG_BODY = json.dumps({"prompt": "x" * 900_000}).encode()
"""The same, and nearly as large as a body may be: its memory is most of what a refused request costs."""


@dataclass(frozen=True)
class PoolRequest:
    """One request of the pool."""

    number: int
    kind: str
    fields: dict[str, Any]
    shape: Shape = "single"
    is_repeatable: bool = True
    """Whether its answer is the same every time."""

    @property
    def body(self) -> bytes:
        """As it is sent."""
        return json.dumps(self.fields).encode()

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of messages."""
        return bool(self.fields.get("stream"))

    @property
    def is_deltas(self) -> bool:
        """Whether messages have only what is new."""
        return bool(self.fields.get("stream_deltas"))

    @property
    def num_outputs(self) -> int:
        """How many texts the answer has."""
        return int(self.fields.get("n", 1))

    @property
    def shows_all_candidates(self) -> bool:
        """Whether every candidate that is generated is in every message."""
        return bool(self.fields.get("best_of", self.num_outputs) == self.num_outputs)


@dataclass(frozen=True)
class Visit:
    """What one client does."""

    number: int
    way: Way
    asked: PoolRequest
    is_reset: bool
    """A client that leaves does so with a reset instead of an end."""
    patience: float
    """From 0 to 1: how long a client that leaves stays, how slowly one reads."""
    keeps_connection: bool
    body: bytes
    """As it is sent, which is not the request's where that is malformed."""
    path: str = "/generate"


def make_pool(seed: int, size: int) -> list[PoolRequest]:
    """As many distinct requests, of all kinds in turn."""
    kinds = list(KINDS.items())
    pool: list[PoolRequest] = []
    for number in range(size):
        kind, make = kinds[number % len(kinds)]
        pool.append(make(number, kind, random.Random(f"{seed}/pool/{number}")))
    return pool


def make_visit(seed: int, number: int, pool: list[PoolRequest], *, ways: Collection[Way] = WAYS) -> Visit:
    """The visit of this number, in one of some ways."""
    generator = random.Random(f"{seed}/{number}")
    way: Way = generator.choices(list(ways), [WAYS[one] for one in ways])[0]
    asked = generator.choice([one for one in pool if FITS.get(way, _any)(one)])
    body, path = asked.body, "/generate"
    if way == "malformed":
        body = generator.choice([*BROKEN_JSON, *BAD_BODIES])
    elif way == "too long":
        body = TOO_LONG_BODY
    elif way == "too large":
        size = MAX_BODY_MIB * 2**20 + generator.choice([1, 2**19])
        body = json.dumps({"prompt": "x" * size}).encode()
    elif way == "other route":
        path = generator.choice(["/health", "/metrics", "/openapi.json"])
    is_reset, keeps_connection = generator.random() < 0.5, generator.random() < 0.7
    return Visit(number, way, asked, is_reset, generator.random(), keeps_connection, body, path)


def _any(asked: PoolRequest) -> bool:
    return asked.kind != "wide"


def _is_stream(asked: PoolRequest) -> bool:
    return asked.is_stream and asked.kind != "wide"


FITS: dict[Way, Callable[[PoolRequest], bool]] = {
    "read slowly": _is_stream,
    "leave the stream": _is_stream,
    "stop reading": lambda asked: asked.kind == "wide",
}
"""Which requests a client asks that behaves so."""


def _prompt(generator: random.Random) -> str:
    start = SYSTEM if generator.random() < 0.4 else ""
    return start + " ".join(generator.choices(WORDS, k=generator.randint(1, 16)))


def _form(generator: random.Random, *, may_be_deltas: bool = True) -> dict[str, Any]:
    """Whole or streamed, with details or without."""
    form: dict[str, Any] = {}
    if generator.random() < 0.55:
        form["stream"] = True
        if may_be_deltas and generator.random() < 0.4:
            form["stream_deltas"] = True
    if generator.random() < 0.3:
        form["details"] = True
    return form


def _base(generator: random.Random, max_tokens: int = 40) -> dict[str, Any]:
    return {"prompt": _prompt(generator), "max_tokens": generator.randint(1, max_tokens)}


def _greedy(number: int, kind: str, generator: random.Random) -> PoolRequest:
    return PoolRequest(number, kind, {**_base(generator), "temperature": 0, **_form(generator)})


def _long(number: int, kind: str, generator: random.Random) -> PoolRequest:
    fields = {**_base(generator), "temperature": 0, "max_tokens": generator.randint(100, 250), "ignore_eos": True}
    return PoolRequest(number, kind, {**fields, "stream": generator.random() < 0.8})


def _sampled(number: int, kind: str, generator: random.Random) -> PoolRequest:
    settings: dict[str, Any] = generator.choice(
        [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}]
    )
    fields = {**_base(generator), "seed": generator.randrange(2**32), "temperature": generator.choice([0.5, 1.0, 1.5])}
    return PoolRequest(number, kind, {**fields, **settings, **_form(generator)})


def _penalties(number: int, kind: str, generator: random.Random) -> PoolRequest:
    penalties = {
        "presence_penalty": generator.uniform(-1, 1),
        "frequency_penalty": generator.uniform(-1, 1),
        "repetition_penalty": generator.uniform(0.8, 1.5),
    }
    return PoolRequest(number, kind, {**_base(generator), "temperature": 0, **penalties, **_form(generator)})


def _stops(number: int, kind: str, generator: random.Random) -> PoolRequest:
    stop = generator.sample(["e", " t", "z", "and", ".", "\n", "q", "M"], generator.randint(1, 4))
    fields = {**_base(generator, 80), "temperature": 0.9, "seed": number, "stop": stop}
    return PoolRequest(
        number, kind, {**fields, "include_stop_str_in_output": generator.random() < 0.5, **_form(generator)}
    )


def _logprobs(number: int, kind: str, generator: random.Random) -> PoolRequest:
    wanted = {"logprobs": generator.choice([0, 1, 4]), "details": True}
    if generator.random() < 0.4:
        wanted["prompt_logprobs"] = generator.choice([0, 1, 3])
    return PoolRequest(number, kind, {**_base(generator, 24), "temperature": 0, **_form(generator), **wanted})


def _candidates(number: int, kind: str, generator: random.Random) -> PoolRequest:
    n = generator.randint(2, 3)
    best_of = n + generator.choice([0, 0, 1])
    fields = {**_base(generator, 24), "seed": number, "temperature": 1.0, "n": n, "best_of": best_of}
    return PoolRequest(number, kind, {**fields, **_form(generator, may_be_deltas=n == best_of)}, "candidates")


def _beams(number: int, kind: str, generator: random.Random) -> PoolRequest:
    fields = {**_base(generator, 16), "temperature": 0, "use_beam_search": True, "n": generator.randint(2, 3)}
    early_stopping, length_penalty = generator.choice([True, False, "never"]), generator.choice([0.5, 1])
    settings = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    return PoolRequest(number, kind, {**fields, **settings, **_form(generator, may_be_deltas=False)}, "beams")


def _unseeded(number: int, kind: str, generator: random.Random) -> PoolRequest:
    fields = {**_base(generator), "temperature": 1.0, "n": generator.randint(1, 2), **_form(generator)}
    return PoolRequest(number, kind, fields, "candidates" if fields["n"] > 1 else "single", is_repeatable=False)


def _wide(number: int, kind: str, generator: random.Random) -> PoolRequest:
    """A stream of a megabyte or two, more than all buffers hold: each message has all tokens so far."""
    wanted = {"stream": True, "details": True, "logprobs": 2}
    return PoolRequest(
        number, kind, {**_base(generator), "max_tokens": 250, "ignore_eos": True, "temperature": 0, **wanted}
    )


KINDS: dict[str, Callable[[int, str, random.Random], PoolRequest]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "long": _long,
    "stop strings": _stops,
    "penalties": _penalties,
    "logprobs": _logprobs,
    "candidates": _candidates,
    "beams": _beams,
    "unseeded": _unseeded,
    "greedy again": _greedy,
    "sampled again": _sampled,
    "wide": _wide,
}
