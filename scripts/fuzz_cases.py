"""What the fuzzer sends: requests made from the server's own schema, and bytes that are no HTTP at all.

A case depends on the seed and its number alone, so that any one of them can be sent again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.helpers.json_schema import VALUES_OF_ALL_TYPES, allows, examples

CLOSED = 0
"""In the place of a status: the connection ended without an answer."""
REFUSED = frozenset({400})
SERVED_OR_REFUSED = frozenset({200, 400})
UNKNOWN_MODEL = frozenset({404})
MAX_NEW_TOKENS = 8
MAX_TOKEN_ID = 100
"""Every vocabulary has more."""
ALPHABET = 'abc xyz.,"\\\n\t\0é你😀\u2028\u0301'
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "9" * 5000, "1" * 10**5)
"""Not in JSON, or larger than any field takes."""
ODD_NUMBERS = ("-0", "1e-999", "0.1e1", "1E2", "1" + "0" * 90)
BROKEN_JSON = (
    b"",
    b"\0",
    b"null",
    b"[]",
    b"true",
    b'"prompt"',
    b"{'prompt': 'a'}",
    b'{"prompt": "a",}',
    b'{"prompt": "a"} {}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\u12"}',
    b'{"prompt": "a\nb"}',
    b'{"prompt": +1}',
    b'{"prompt": "a", "n": 01}',
    b'{"prompt": "a", "\\udfff": 1}',
    b"\xef\xbb\xbf\xef\xbb\xbf{}",
    '{"prompt": "a"}'.encode("utf-16"),
)


def head_of(path: str) -> bytes:
    """The beginning of a request to generate, to which headers may be added."""
    return b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" % path.encode()


HEAD = head_of("/generate")
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN_HTTP = (
    b"\r\n\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1 x\r\n\r\n",
    b"G\0T /health HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost\r\n\r\n",
    b"GET /health HTTP/1.1\r\n: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHo st: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: +5\r\n\r\nabcde",
    HEAD + b"Content-Length: 1e3\r\n\r\n",
    HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    HEAD + b"Transfer-Encoding: gzip, banana\r\n\r\n",
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    CHUNKED + b"x\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"2 \r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"f" * 40 + b"\r\n{}\r\n0\r\n\r\n",
    b"GET /health HTTP/0.9\r\n\r\n",
    b"GET http://[bad/ HTTP/1.1\r\nHost: a\r\n\r\n",
    CHUNKED + b"2;" + b"e" * 50_000 + b"\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"2\r\n{}\r\n0\r\nTrailer\r\n\r\n",
)
ODD_HEADERS = (
    "Content-Type: application/x-www-form-urlencoded",
    "Content-Type: \x7f; charset=nothing",
    "Accept-Encoding: gzip, deflate, br",
    "Expect: 100-continue",
    "Expect: the worst",
    "Cookie: " + "a=b; " * 500,
    "Range: bytes=5-2",
    "Upgrade: websocket",
    "X-Request-Id: ../../\xe9",
    "Authorization: Basic !!!",
    "Forwarded: for=unknown",
)


@dataclass(frozen=True)
class Case:
    """One connection: what is sent over it and what may come back."""

    kind: str
    data: bytes
    allowed: frozenset[int] | None
    """Statuses, and CLOSED; None for anything below 500."""
    may_wait: bool = False
    """Whether the server may rightly wait for more, or keep the connection."""
    leave_after: int | None = None
    """The client leaves once it has this many bytes of the answer; None reads all."""


class Cases:
    """The cases of one seed, for all routes of a server that take a body."""

    def __init__(self, request_schemas: Mapping[str, dict[str, Any]], seed: int) -> None:
        """`request_schemas` are those of the bodies, by path."""
        self._routes = [RouteCases(path, schema) for path, schema in request_schemas.items()]
        self._seed = seed

    def make(self, number: int) -> Case:
        """The case of this number."""
        generator = random.Random(f"{self._seed}/{number}")
        return generator.choice(self._routes).make(generator)


class RouteCases:
    """The cases of one route."""

    def __init__(self, path: str, request_schema: dict[str, Any]) -> None:
        self._path = path
        self._head = head_of(path)
        self._properties: dict[str, Any] = request_schema["properties"]
        self._required: str = request_schema["required"][0]
        prompts = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        self._plain: dict[str, Any] = {self._required: prompts[self._required], "max_tokens": 2}
        """The least of a valid request."""
        self._optional = {
            name: makes for name, schema in self._properties.items() if (makes := _values_of(name, schema))
        }
        self._kinds: list[tuple[Callable[[random.Random], Case], int]] = [
            (self._valid, 6),
            (self._one_field, 6),
            (self._odd_number, 2),
            (self._unknown_field, 1),
            (self._nested, 1),
            (self._broken_json, 2),
            (self._too_large, 1),
            (self._broken_http, 3),
            (self._wrong_route, 1),
            (self._odd_headers, 2),
            (self._mutated, 3),
            (self._truncated, 2),
            (self._leaving, 2),
        ]

    def make(self, generator: random.Random) -> Case:
        """A case of any kind."""
        makers, weights = zip(*self._kinds)
        maker: Callable[[random.Random], Case] = generator.choices(makers, weights)[0]
        return maker(generator)

    def _fields(self, generator: random.Random) -> dict[str, Any]:
        """Valid ones, whatever the model: short prompts, few tokens, small ids."""
        fields: dict[str, Any] = {
            self._required: self._allowed(self._required, generator),
            "max_tokens": generator.randint(1, MAX_NEW_TOKENS),
        }
        for name in generator.sample(list(self._optional), generator.randint(0, min(8, len(self._optional)))):
            fields[name] = self._allowed(name, generator)
        mode = generator.choice(["sampled", "sampled", "greedy", "candidates", "beams"])
        if mode == "greedy":
            fields["temperature"] = 0
        elif mode == "candidates":
            fields |= {"n": generator.randint(1, 3), "temperature": generator.uniform(0.1, 2)}
        elif mode == "beams":
            fields |= {"use_beam_search": True, "n": 2, "temperature": 0, "top_p": 1, "top_k": -1}
            fields |= {"early_stopping": generator.choice([True, False, "never"]), "length_penalty": 0.5}
        elif fields.get("stream") and "stream_deltas" in self._properties:
            fields["stream_deltas"] = generator.choice([True, False, None])
        return self._in_harmony(fields)

    def _allowed(self, name: str, generator: random.Random) -> Any:
        """A value of a field that its schema has nothing against."""
        makes = PROMPTS[name] if name == self._required else self._optional[name]
        while not allows(self._properties[name], value := makes(generator)):
            pass
        return value

    def _in_harmony(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields without those that others do not go with, and with those that others need."""
        foreign: set[str] = set()
        if "allowed_token_ids" in fields:  # together these may leave no token at all, which is refused
            foreign |= {"min_tokens", "bad_words"}
        if fields.get("use_beam_search") and "stream_deltas" not in self._properties:  # new text alone is all there is
            foreign.add("stream")
        if not fields.get("stream") or "stream" in foreign:
            foreign |= {"stream_options", "stream_deltas"}
        needed: dict[str, Any] = {}
        if "top_logprobs" in fields:
            needed["logprobs"] = True
        if "continue_final_message" in fields:
            needed["add_generation_prompt"] = False
        return {name: value for name, value in (fields | needed).items() if name not in foreign}

    def _valid(self, generator: random.Random) -> Case:
        return Case("valid", self._post(self._fields(generator)), frozenset({200}))

    def _one_field(self, generator: random.Random) -> Case:
        """A value of any type, or at or just beyond a bound. What the schema forbids must be refused."""
        name = generator.choice(list(self._properties))
        schema = self._properties[name]
        value = generator.choice([*VALUES_OF_ALL_TYPES, *examples(schema)])
        allowed = SERVED_OR_REFUSED if allows(schema, value) else REFUSED
        if name == "model" and isinstance(value, str):
            allowed = UNKNOWN_MODEL
        return Case("one field", self._post({**self._plain, name: value}), allowed)

    def _odd_number(self, generator: random.Random) -> Case:
        name = generator.choice(list(self._properties))
        number = generator.choice(NO_NUMBERS + ODD_NUMBERS)
        value = generator.choice([number, f"[{number}]", f'{{"5": {number}}}'])
        body = f'{json.dumps(self._plain)[:-1]}, "{name}": {value}}}'
        return Case(
            "odd number", self._post_bytes(body.encode()), REFUSED if number in NO_NUMBERS else SERVED_OR_REFUSED
        )

    def _unknown_field(self, generator: random.Random) -> Case:
        name = generator.choice(["", "x" * 3000, "__class__", "max_token", "é\0", "Prompt"])
        return Case("unknown field", self._post({**self._plain, name: 1}), REFUSED)

    def _broken_json(self, generator: random.Random) -> Case:
        body = json.dumps(self._fields(generator)).encode()
        cut = body[: generator.randrange(len(body))]
        return Case("broken JSON", self._post_bytes(generator.choice([cut, *BROKEN_JSON])), REFUSED)

    def _odd_headers(self, generator: random.Random) -> Case:
        headers = generator.sample(ODD_HEADERS, generator.randint(1, 3))
        body = json.dumps({**self._fields(generator), **self._plain}).encode()
        return Case("odd headers", self._post_bytes(body, *headers), None)

    def _mutated(self, generator: random.Random) -> Case:
        """A valid request with a few bytes changed, in its body or anywhere."""
        body = json.dumps(self._fields(generator)).encode()
        if _flag(generator):
            return Case("mutated body", self._post_bytes(_with_changes(body, generator)), SERVED_OR_REFUSED)
        data = _with_changes(self._post_bytes(body), generator)
        return Case("mutated", data, None, may_wait=True)

    def _truncated(self, generator: random.Random) -> Case:
        data = self._post(self._fields(generator))
        return Case("truncated", data[: generator.randrange(len(data))], None, may_wait=True)

    def _leaving(self, generator: random.Random) -> Case:
        endless = {name: None for name in ("max_tokens", "max_completion_tokens") if name in self._properties}
        fields = self._fields(generator) | {"stream": generator.random() < 0.7} | endless
        data = self._post(self._in_harmony(fields))
        return Case("leaving", data, frozenset({200}), leave_after=generator.choice([0, 1, 300]))

    def _nested(self, generator: random.Random) -> Case:
        depth = generator.choice([100, 5_000, 200_000])
        value = generator.choice(["[" * depth + "]" * depth, "[" * depth, '{"a":' * depth + "1" + "}" * depth])
        plain = json.dumps(self._plain)[:-1]
        body = generator.choice([value, f'{{"{self._required}": {value}}}', f'{plain}, "stop": {value}}}'])
        return Case("nested", self._post_bytes(body.encode()), frozenset({400, 413}))

    def _too_large(self, generator: random.Random) -> Case:
        """Lengths that are announced and never come, and chunks that do."""
        if generator.random() < 0.7:
            length = b"Content-Length: %d\r\n\r\n" % generator.choice([2**40, 2**63, 10**18])
            return Case("too large", self._head + length + b'{"prompt":', frozenset({413}))
        chunk = b"%x\r\n" % 2**16 + b"x" * 2**16 + b"\r\n"
        data = CHUNKED + chunk * 24 + b"0\r\n\r\n"
        return Case("too large", data.replace(HEAD, self._head, 1), frozenset({400, 413}))

    def _broken_http(self, generator: random.Random) -> Case:
        data = generator.choice([*BROKEN_HTTP, generator.randbytes(generator.randint(1, 300))])
        return Case("broken HTTP", data.replace(HEAD, self._head, 1), frozenset({400, CLOSED}), may_wait=True)

    def _wrong_route(self, generator: random.Random) -> Case:
        method = generator.choice(["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
        near = [f"{self._path}/", f"{self._path}?a=b"]
        path = generator.choice(["/", "/../../etc/passwd", "/%00", "/%ff%fe", "//", "/v1", *near])
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        return Case("wrong route", head.encode(), frozenset({400, 404, 405}))

    def _post(self, fields: dict[str, Any]) -> bytes:
        return self._post_bytes(json.dumps(fields).encode())

    def _post_bytes(self, body: bytes, *headers: str) -> bytes:
        lines = "".join(f"{header}\r\n" for header in headers).encode("latin-1")
        return self._head + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _with_changes(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(len(changed))
        piece = generator.choice([generator.randbytes(generator.randint(1, 3)), b"", b'"', b",", b"9", b"-", b"\r\n"])
        changed[position : position + generator.randint(0, 3)] = piece
    return bytes(changed)


def _text(generator: random.Random) -> str:
    return "a" + "".join(generator.choices(ALPHABET, k=generator.randint(0, 15)))


def _ids(generator: random.Random) -> list[int]:
    return [generator.randint(0, MAX_TOKEN_ID) for _ in range(generator.randint(1, 5))]


def _flag(generator: random.Random) -> bool:
    return generator.random() < 0.5


VALID: dict[str, Callable[[random.Random], Any]] = {
    "stream": lambda generator: generator.choice([True, False, None, 1, 0, "x"]),
    "details": _flag,
    "presence_penalty": lambda generator: generator.uniform(-2, 2),
    "frequency_penalty": lambda generator: generator.uniform(-2, 2),
    "repetition_penalty": lambda generator: generator.choice([1e-6, 0.5, 1, 3, 1e30]),
    "temperature": lambda generator: generator.choice([0, 1e-5, 0.7, 1, 100, 1e30]),
    "top_p": lambda generator: generator.choice([1e-30, 0.3, 1]),
    "top_k": lambda generator: generator.choice([-1, 0, 1, 5, 10**30]),
    "min_p": lambda generator: generator.choice([0, 0.2, 1]),
    "stop": lambda generator: generator.choice([_text(generator), [_text(generator) for _ in range(4)], []]),
    "stop_token_ids": _ids,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "min_tokens": lambda generator: generator.choice([0, 1]),
    "logprobs": lambda generator: generator.choice([0, 1, 3, True, False]),
    "prompt_logprobs": lambda generator: generator.choice([0, 1, 3]),
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "seed": lambda generator: generator.randint(-(2**63), 2**63 - 1),
    "logit_bias": lambda generator: {str(key): generator.uniform(-100, 100) for key in _ids(generator)},
    "allowed_token_ids": _ids,
    "bad_words": lambda generator: generator.choices(["a", "xyz", "b c"], k=2),
    "truncate_prompt_tokens": lambda generator: generator.choice([1, 3, 10**30]),
    "echo": _flag,
    "add_special_tokens": _flag,
    "max_completion_tokens": lambda generator: generator.randint(1, MAX_NEW_TOKENS),
    "top_logprobs": lambda generator: generator.choice([0, 1, 3]),
    "add_generation_prompt": _flag,
    "continue_final_message": _flag,
    "chat_template_kwargs": lambda generator: generator.choice([None, {}, {"a": [1]}]),
    "stream_options": lambda generator: {"include_usage": _flag(generator), "continuous_usage_stats": _flag(generator)},
}
"""Values that every model takes, among them some that not every route does."""


def _prompt(generator: random.Random) -> Any:
    """A text, ids, or a list of them."""
    some = range(generator.randint(1, 3))
    lists = [[_text(generator) for _ in some], [_ids(generator) for _ in some]]
    return generator.choice([_text(generator), _ids(generator), *lists])


def _messages(generator: random.Random) -> list[dict[str, Any]]:
    """One of a user, which every template takes."""
    parts: Any = [{"type": "text", "text": _text(generator)} for _ in range(generator.randint(1, 3))]
    content = generator.choice([_text(generator), parts])
    return [{"role": "user", "content": content}]


PROMPTS: dict[str, Callable[[random.Random], Any]] = {"prompt": _prompt, "messages": _messages}


def _values_of(name: str, schema: dict[str, Any]) -> Callable[[random.Random], Any] | None:
    """What draws values of a field that need no other field; None where there is nothing."""
    if set(schema) <= {"enum", "description"}:  # a field without effect, or one whose every harmless value is told
        return lambda generator: generator.choice(schema.get("enum", VALUES_OF_ALL_TYPES))
    return VALID.get(name)
