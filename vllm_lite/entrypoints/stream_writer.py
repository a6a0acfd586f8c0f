"""Writes a stream to a client, and ends it as what becomes of its request demands. Knows no protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from aiohttp import HttpVersion11, web

from vllm_lite.entrypoints.failures import ENGINE_ERRORS, CutShortError
from vllm_lite.entrypoints.request_id import current_request_id
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.entrypoints.stalled_readers import cut_when_stalled, reset_at_close, takes_at_once
from vllm_lite.errors import EngineDeadError, RequestFailedError

logger = logging.getLogger(__name__)

UNBUFFERED = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the messages
}
"""Headers of every stream."""
EXPECTED = (RequestFailedError, EngineDeadError, CutShortError)
"""What may end a stream that has begun; where it comes from is in the log already."""


class StreamWriter(AbstractAsyncContextManager["StreamWriter"]):
    """Sends nothing, not even a header, before the first message: until then a failure has a status of its own.

    As a context manager it takes note of clients that leave. Where the request fails after its first message, by
    whatever error, the connection ends without its last chunk, for a stream without its end is how a client of HTTP
    sees that it failed; before that goes what `last_words` makes of the error. HTTP/1.0 has no chunks: there the end of
    the connection is the end of the stream, and only a reset is an error, so that any end but the right one is a reset.
    """

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        record: RequestRecord,
        slow_client_s: float,
        *,
        last_words: Callable[[Exception], bytes] | None = None,
    ) -> None:
        self.response = web.StreamResponse(headers=headers)
        self._has_begun = False
        self._has_chunks = request.version >= HttpVersion11
        if not self._has_chunks:
            self.response.force_close()
        self._request = request
        self._record = record
        self._slow_client_s = slow_client_s
        self._last_words = last_words

    @property
    def has_outcome(self) -> bool:
        """Whether the client has got something, or has left."""
        return self.response.prepared or self._record.error is not None

    async def write(self, message: bytes) -> None:
        """Sends a message, which must not be empty. Raises ConnectionResetError where nobody is left to read."""
        wire = self._request.transport
        if self._has_begun and self._has_chunks and takes_at_once(wire, len(message)):
            # What aiohttp would write, in a third of the time: this is done for each token of each stream.
            wire.write(b"%x\r\n%b\r\n" % (len(message), message))
            return
        if not self._has_begun:
            self._make_end_an_error(True)
            await self.response.prepare(self._request)
            self._has_begun = True
        with cut_when_stalled(self._request, self._slow_client_s):
            await self.response.write(message)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            self._make_end_an_error(False)
            return False
        if isinstance(error, ConnectionError):
            self._record.error = error
            return True
        if isinstance(error, Exception) and self.response.prepared:  # no answer but this one can be sent any more
            self._record.error = error
            if not isinstance(error, EXPECTED):
                logger.error("request %s: an error in mid-stream", current_request_id(), exc_info=error)
            await self._fail(error)
            return True
        return False

    async def _fail(self, error: Exception) -> None:
        if self._last_words is not None:
            known = error if isinstance(error, ENGINE_ERRORS) else RequestFailedError("internal error.")
            try:
                await self.write(self._last_words(known))
            except ConnectionError:
                return
        if self._request.transport is not None:
            if self._has_chunks:
                self._request.protocol.force_close()  # not the transport: aiohttp would close that a second time
            else:
                self._request.transport.abort()

    def _make_end_an_error(self, is_error: bool) -> None:
        """Where nothing but the end of the connection tells the end of the stream."""
        if not self._has_chunks and self._request.transport is not None:
            reset_at_close(self._request.transport, is_error)
