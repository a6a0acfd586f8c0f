"""Counts the requests to generate that were never queued, by the status that they were answered with."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

CLIENT_LEFT = 499
"""nginx's number for a client that left before there was a status."""
STATUSES = (400, 401, 403, 405, 408, 413, CLIENT_LEFT, 503, 504)
"""Those that there are from the start, so that the first refusal is seen as a rise from 0."""


class Refusals:
    """With the engine's count of accepted requests, these are all that came to the paths, each counted once."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self._counts = Counter(dict.fromkeys(STATUSES, 0))
        self._queued: set[int] = set()
        """The identities of open requests that the engine has accepted. From then on it counts them."""

    @property
    def counts(self) -> Mapping[int, int]:
        """Refused requests by status."""
        return self._counts

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Outside of all middlewares that refuse."""
        if request.path not in self._paths or request.method == hdrs.METH_OPTIONS:  # preflights ask for nothing
            return await handler(request)
        status = 500  # where a fault of the server's own gets past the middlewares
        try:
            response = await handler(request)
            status = response.status
            return response
        except asyncio.CancelledError:
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
