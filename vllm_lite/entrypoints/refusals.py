"""Counts the requests for text that were never queued, by the status that they were answered with."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

CLIENT_LEFT = 499
"""nginx's number for a client that left before there was a status."""
STATUSES = (400, 401, 403, 404, 405, 408, 413, CLIENT_LEFT, 500, 503, 504)
"""Those that there are from the start, so that the first refusal is seen as a rise from 0."""


class Refusals:
    """With those that the engine has accepted, these are all that came to some paths, each counted once."""

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(STATUSES, 0))
        self._queued: set[int] = set()
        """The identities of open requests that the engine has accepted. From then on it counts them."""

    @property
    def counts(self) -> Mapping[int, int]:
        """Refused requests by status."""
        return self._counts

    def count_at(self, paths: Collection[str]) -> Middleware:
        """A middleware for the outside of all that refuse."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in paths or request.method == hdrs.METH_OPTIONS:  # preflights ask for nothing
                return await handler(request)
            return await self._count(request, handler)

        return count

    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        status = 500  # where a fault of the server's own gets past the middlewares
        try:
            response = await handler(request)
            status = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):  # the latter where the time of a body is limited
            status = CLIENT_LEFT
            raise
        finally:
            if id(request) in self._queued:
                self._queued.discard(id(request))
            else:
                self._counts[status] += 1

    def mark_queued(self, request: web.Request) -> None:
        """To be called when the engine has accepted a request."""
        self._queued.add(id(request))
