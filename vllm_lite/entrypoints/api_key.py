"""Who may call: with `--api-key`, whoever sends it as a bearer token. The key is never shown."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vllm_lite.entrypoints.failures import Failure, FailureError

OPEN_PATHS = frozenset({"/docs", "/health"})
"""A page that a browser opens, which cannot send a key with it, and whose panel asks for one; and what supervisors and
balancers ask, which have none: whether the engine lives, and nothing else."""
MISSING = "this server needs a key: send it as `Authorization: Bearer <key>`."
WRONG = "the key is wrong."


def require_key(key: str) -> Middleware:
    """A middleware that answers 401 to a request that does not carry the key."""
    expected = key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # In constant time, so that nobody learns from it how much of a guess was right.
        if hmac.compare_digest(token.strip().encode(errors="surrogateescape"), expected) and scheme.lower() == "bearer":
            return await handler(request)
        raise FailureError(Failure(401, WRONG if token else MISSING, headers={"WWW-Authenticate": "Bearer"}))

    return check
