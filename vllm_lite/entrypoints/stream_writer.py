"""Writes a stream to a client, and ends it as what becomes of its request demands. Knows no protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from aiohttp import HttpVersion11, web

from vllm_lite.entrypoints.failures import CutShortError
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.entrypoints.stalled_readers import write_or_cut
from vllm_lite.errors import EngineDeadError, RequestFailedError

UNBUFFERED = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the messages
}
"""Headers of every stream."""


class StreamWriter(AbstractAsyncContextManager["StreamWriter"]):
    """Sends nothing, not even a header, before the first message: until then a failure has a status of its own.

    As a context manager it takes note of clients that leave. Where the request fails after its first message, the
    connection ends without its last chunk, for a stream without its end is how a client of HTTP sees that it failed;
    before that goes what `last_words` makes of the error.
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
        if request.version < HttpVersion11:  # which has no chunks: the end of the connection is the end of the stream
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
        """Raises ConnectionResetError where nobody is left to read."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await write_or_cut(self._request, self.response, message, self._slow_client_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, ConnectionResetError):
            self._record.error = error
            return True
        if isinstance(error, (RequestFailedError, EngineDeadError, CutShortError)) and self.response.prepared:
            self._record.error = error
            await self._fail(error)
            return True
        return False

    async def _fail(self, error: Exception) -> None:
        if self._last_words is not None:
            try:
                await self.write(self._last_words(error))
            except ConnectionResetError:
                return
        if self._request.transport is not None:
            self._request.transport.close()
