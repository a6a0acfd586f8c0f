"""One connection: what is no HTTP, or not the HTTP that is spoken here, gets an answer like any other. Knows no route.

aiohttp answers what its parser refuses by itself, in plain text and with its version, before any middleware. And it
waits an hour for the head of a request, and for ever for a client to read the end of an answer, so that clients that do
little or nothing could use up the connections. What this takes of aiohttp's private names is asked for directly: if one
of them goes, no connection works, and no protection ends in silence.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.typedefs import Handler

from vllm_lite.entrypoints.failures import Failure, FailureError, FailureShape, failure_response
from vllm_lite.entrypoints.request_id import HEADER, current_request_id
from vllm_lite.entrypoints.responses import SERVER
from vllm_lite.entrypoints.stalled_readers import cut

logger = logging.getLogger(__name__)

SPOKEN = (HttpVersion10, HttpVersion11)
MAX_REASON_CHARS = 300
"""Of what the parser says, which may quote a whole header."""


class HttpConnection(web.RequestHandler):
    """A connection whose errors have the protocol's shape, too, and which is cut where its client is too slow.

    That is where the head of a request takes longer than `slow_client_s` from its first byte, or from the beginning of
    the connection, and where what is left of an answer waits longer than that for the client to read.
    """

    __slots__ = ("_body", "_head_timer", "_is_in_head", "_shape", "_slow_client_s", "_unsent_timer", "_wire")

    def __init__(self, server: web.Server, shape: FailureShape, slow_client_s: float, **options: Any) -> None:
        super().__init__(server, **options)
        self._shape = shape
        self._slow_client_s = slow_client_s
        self._wire: asyncio.Transport | None = None
        """Until the connection is lost; aiohttp forgets its own where it closes."""
        self._body: StreamReader = EMPTY_PAYLOAD
        """Of the last request whose head is whole."""
        self._is_in_head = False
        """Whether a part of a head has come, behind all that is whole."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes a new connection."""
        super().connection_made(transport)
        self._wire = self.transport
        self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Lets go of a connection."""
        self._wire = None
        self._stop_head_timer()
        self._stop_unsent_timer()
        super().connection_lost(exc)

    @property
    def num_unsent(self) -> int:
        """Bytes of answers that wait for the client; none once the connection is lost."""
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Ends the connection. One that is closing is not closed again: with TLS it would forget what it is sending."""
        if self.transport is not None and self.transport.is_closing():
            self.transport = None
        await super().shutdown(timeout)

    def data_received(self, data: bytes) -> None:
        """Takes what has come. Where the rest of a body cannot be read, its reader is told, which aiohttp forgets.

        The parser does not tell whether it is between two requests or in a head. So the last byte goes by itself: it is
        part of a head if it is of no body and makes nothing whole.
        """
        if len(data) > 1:
            self._feed(data[:-1])
        num_messages, was_in_body = len(self._messages), not self._body.is_eof()
        self._feed(data[-1:])
        if data:  # and not what the parser had held back
            makes_whole = was_in_body or len(self._messages) > num_messages
            self._is_in_head = self._body.is_eof() and not makes_whole
        if not self._is_idle:
            self._stop_head_timer()
        elif self._is_in_head:
            self._start_head_timer()
        request = self._current_request
        if self._messages and request is not None and not request.content.is_eof():  # behind half a body is an error
            request.content.set_exception(web.RequestPayloadError("it is no valid HTTP."))
            self.close()  # once the request is answered: nothing behind it makes sense

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._body = self._messages[-1][1]

    @property
    def _is_idle(self) -> bool:
        """No request is being handled, and none is ready to be."""
        return self._current_request is None and not self._messages

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(self._slow_client_s, self._cut_without_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cut_without_head(self) -> None:
        self._head_timer = None
        if self._wire is not None and self._is_idle:
            limit_s = self._slow_client_s
            logger.info("a connection without a whole head of a request within %g s is cut (--slow-client-s)", limit_s)
            self._wire.abort()

    def _time_what_is_left(self) -> None:
        """After an answer: of the request, as of one behind it, and of the answer, with the time of the last one."""
        self._stop_unsent_timer()
        if self._wire is None:
            return
        if self._wire.is_closing() or self.num_unsent:
            self._unsent_timer = asyncio.get_running_loop().call_later(self._slow_client_s, self._cut_unsent)
        if self._is_in_head and self._is_idle:
            self._start_head_timer()

    def _stop_unsent_timer(self) -> None:
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
            self._unsent_timer = None

    def _cut_unsent(self) -> None:
        """But beside a request that is being handled, whose writes and whose end have timers of their own."""
        self._unsent_timer = None
        wire = self._wire
        if wire is not None and (wire.is_closing() or (self._is_idle and self.num_unsent)):
            cut(wire, self._slow_client_s)

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
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._time_what_is_left()

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
