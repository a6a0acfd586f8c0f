"""One connection: what is no HTTP, or not the HTTP that is spoken here, gets an answer like any other. Knows no route.

aiohttp answers what its parser refuses by itself, in plain text and with its version, before any middleware. And it
waits an hour for the head of a request, so that whoever sends a byte now and then could use up the connections.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler

from vllm_lite.entrypoints.failures import Failure, FailureError, FailureShape, failure_response
from vllm_lite.entrypoints.request_id import HEADER, current_request_id
from vllm_lite.entrypoints.responses import SERVER

logger = logging.getLogger(__name__)

SPOKEN = (HttpVersion10, HttpVersion11)
MAX_REASON_CHARS = 300
"""Of what the parser says, which may quote a whole header."""


class HttpConnection(web.RequestHandler):
    """A connection whose errors have the protocol's shape, too, and which is closed without a head in time."""

    __slots__ = ("_head_limit_s", "_head_timer", "_shape")

    def __init__(self, server: web.Server, shape: FailureShape, head_limit_s: float, **options: Any) -> None:
        super().__init__(server, **options)
        self._shape = shape
        self._head_limit_s = head_limit_s
        self._head_timer: asyncio.TimerHandle | None = None
        """Runs from the beginning of the connection, and then from the first byte of a head, until it is whole."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes a new connection."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Lets go of a connection."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what has come. Where the rest of a body cannot be read, its reader is told, which aiohttp forgets."""
        super().data_received(data)
        if self._waits_for_head:
            self._start_head_timer()
        else:
            self._stop_head_timer()
        # Of aiohttp's private names: without them such a reader would wait until its client leaves, as in aiohttp.
        request, messages = getattr(self, "_current_request", None), getattr(self, "_messages", ())
        if messages and request is not None and not request.content.is_eof():  # what follows half a body is an error
            request.content.set_exception(web.RequestPayloadError("it is no valid HTTP."))
            self.close()  # once the request is answered: nothing behind it makes sense

    @property
    def _waits_for_head(self) -> bool:
        """By aiohttp's own, private, account: no request is being handled, and none is ready to be."""
        waiter: asyncio.Future[None] | None = getattr(self, "_waiter", None)
        return waiter is not None and not waiter.done()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(self._head_limit_s, self._close_without_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_without_head(self) -> None:
        self._head_timer = None
        if self._waits_for_head:
            limit_s = self._head_limit_s
            logger.info("a connection without a whole head of a request within %g s is cut (--slow-client-s)", limit_s)
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what the parser refuses, or to a fault of the server's own. Ends the connection."""
        super().handle_error(request, status, exc, message)  # writes to the log
        detail = f"the request is not valid HTTP/1.1: {_reason(message or '')}" if status == 400 else "internal error."
        return self._failure(status, detail)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends an answer. An error that is aiohttp's own came before any handler: an `Expect` that nobody meets."""
        if isinstance(resp, web.HTTPException):
            resp = self._failure(resp.status, f"{resp.text or resp.reason}."[:MAX_REASON_CHARS])
        return await super().finish_response(request, resp, start_time)

    def _failure(self, status: int, detail: str) -> web.Response:
        headers = {"Server": SERVER, HEADER: current_request_id()}
        return failure_response(Failure(status, detail, headers=headers, closes_connection=True), self._shape)


@web.middleware
async def refuse_other_versions(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The parser lets pass HTTP/0.9, whose requests are one line, and what calls itself HTTP/2.0 and is not."""
    if request.version in SPOKEN:
        return await handler(request)
    major, minor = request.version
    detail = f"the request must be HTTP/1.1 or HTTP/1.0, got HTTP/{major}.{minor}."
    raise FailureError(Failure(400, detail, closes_connection=True))


def _reason(message: str) -> str:
    """In one line, without the mark below the place where the parser stopped."""
    lines = (line.strip() for line in message.splitlines())
    return " ".join(line for line in lines if line.strip("^"))[:MAX_REASON_CHARS]
