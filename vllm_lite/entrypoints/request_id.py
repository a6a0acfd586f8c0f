"""The id by which client and log know a request, in `X-Request-Id` of every answer: the client's own if it fits."""

from __future__ import annotations

import re
from contextvars import ContextVar
from random import Random

from aiohttp import web
from aiohttp.typedefs import Handler

HEADER = "X-Request-Id"
FITTING = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What cannot break a line of a log or a header."""

_random = Random()
"""Seeded by the system once: asking it for every request took a millisecond on some machines, and no id is a secret."""
_current: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Each request is handled in a context of its own."""


def client_request_id(request: web.Request) -> str | None:
    """The id that the client chose; None where it chose none, or one that does not fit."""
    chosen = request.headers.get(HEADER, "")
    return chosen if FITTING.fullmatch(chosen) else None


def new_request_id() -> str:
    """One that nothing else has."""
    return f"{_random.getrandbits(128):032x}"


def current_request_id() -> str:
    """The id in the answer's header; a new one where the request was refused before it got one."""
    return _current.get() or new_request_id()


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives a request its id: the outermost middleware, for errors have one, too."""
    _current.set(client_request_id(request) or new_request_id())
    return await handler(request)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """To be called before the headers of an answer are sent."""
    response.headers[HEADER] = current_request_id()
