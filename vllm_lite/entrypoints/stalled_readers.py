"""Connections whose clients do not read are cut: what waits for them takes memory, and their requests take blocks.

A write blocks while the buffers are full: that of the connection with 64 KiB and a message, and the system's, which
`limit_unsent` bounds. Meanwhile the engine's deltas wait, at most one a token. What fits the buffers blocks no write:
it is timed by `HttpConnection`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeGuard

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vllm_lite.entrypoints.request_id import current_request_id

logger = logging.getLogger(__name__)

SURELY_TAKEN = 32 * 1024
"""Bytes that an empty buffer takes at once: half of what makes asyncio ask for a pause."""


def reset_at_close(transport: asyncio.BaseTransport, is_wanted: bool) -> None:
    """Whether the end of a connection, however it comes, is an error for its client, and not a mere end."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_wanted, 0))


def cut(transport: asyncio.WriteTransport, limit_s: float) -> None:
    """Ends a connection at once; the system, too, lets go of what waits."""
    message = "request %s: what was written has waited %g s for its client; the connection is cut (--slow-client-s)"
    logger.warning(message, current_request_id(), limit_s)
    reset_at_close(transport, True)
    transport.abort()


@contextmanager
def cut_when_stalled(request: web.Request, limit_s: float) -> Iterator[None]:
    """Around one write. A connection that is cut cancels the handler of its request."""

    def cut_now() -> None:
        if request.transport is not None:
            cut(request.transport, limit_s)

    timer = asyncio.get_running_loop().call_later(limit_s, cut_now)
    try:
        yield
    finally:
        timer.cancel()


def takes_at_once(transport: asyncio.WriteTransport | None, num_bytes: int) -> TypeGuard[asyncio.WriteTransport]:
    """Whether a connection is open and a write of so many bytes cannot wait, as with most: it needs no timer."""
    if transport is None or transport.is_closing():
        return False
    return not transport.get_write_buffer_size() and num_bytes < SURELY_TAKEN


def write_in_time(limit_s: float) -> Middleware:
    """A middleware that writes whole answers, and the ends of streams, so that these are cut, too."""

    @web.middleware
    async def write(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        with cut_when_stalled(request, limit_s), suppress(ConnectionError):  # aiohttp notices that nobody is left
            await response.prepare(request)
            await response.write_eof()
        return response

    return write
