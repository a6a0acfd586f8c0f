"""The way of a request from its body to the engine's deltas: limits of size, time and number. Knows no protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from aiohttp import web

from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.failures import CutShortError, Failure, FailureError
from vllm_lite.entrypoints.refusals import Refusals
from vllm_lite.entrypoints.request_id import client_request_id, current_request_id, new_request_id
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.entrypoints.served_engine import ServedModel
from vllm_lite.errors import OverloadedError, RequestError
from vllm_lite.outputs import RequestDelta
from vllm_lite.sampling_params import SamplingParams

Deltas = AsyncIterator[RequestDelta]
Asked = TypeVar("Asked")
Made = TypeVar("Made")

MIB = 2**20
MAX_INLINE_BODY = 64 * 1024
"""Bytes of a body that the event loop parses itself: a few milliseconds at most."""
STOPPING = Failure(
    503, "the server is stopping; send the request to another one or wait for its restart.", closes_connection=True
)


@dataclass
class ServerState:
    """What the handlers need to know about the life of the server."""

    is_stopping: bool = False


@dataclass(frozen=True)
class Prompt:
    """What the engine goes on with: a text, or the ids that it has."""

    text: str | None
    token_ids: Sequence[int] | None = None
    add_special_tokens: bool = True
    """Whether the tokenizer adds its own, such as BOS, to a text."""


class RequestService:
    """What the handlers of one server do with every request, whatever its protocol."""

    def __init__(
        self,
        model: ServedModel,
        state: ServerState,
        engine_config: EngineConfig,
        config: ServerConfig,
    ) -> None:
        self.model = model
        self.engine = model.engine
        names = config.served_model_name or (model.model_name,)
        # A folder's may be any bytes.
        self.model_names = tuple(name.encode(errors="replace").decode() for name in names)
        """What the model is called, by clients and in metrics: the first of them where one is to be told."""
        self.state = state
        self.engine_config = engine_config
        self.config = config
        self.refusals = Refusals()
        self._waiting_ids: set[str] = set()
        """Of the requests that are open, and had not left the queue when `check_queue` last looked."""
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")

    @contextmanager
    def record(self, request: web.Request) -> Iterator[RequestRecord]:
        """Around everything that a request needs: its line in the log, and its limit of time."""
        client_id = client_request_id(request)
        request_id = new_request_id() if client_id else current_request_id()  # two clients may choose the same one
        new_record = RequestRecord(request_id, self.engine_config, client_id, self.config.request_timeout_s)
        with new_record as record, self._time_limit(record):
            self.check_queue()  # before memory is spent on the body, too
            try:
                yield record
            finally:
                if record.was_queued:
                    self.refusals.mark_queued(request)

    async def compute(self, record: RequestRecord, function: Callable[[], Made]) -> Made:
        """What a function gives, on the thread that parses: for what would hold up the event loop.

        Raises what the function raises, and CutShortError where that takes longer than the request may.
        """
        computing = asyncio.get_running_loop().run_in_executor(self._parser, function)
        try:
            return await asyncio.wait_for(computing, record.time_left_s)
        except asyncio.TimeoutError as error:
            record.is_late = True
            raise self.cut_short(record) from error

    async def read(self, request: web.Request, record: RequestRecord, parse: Callable[[bytes], Asked]) -> Asked:
        """The body, parsed: on a thread where it is long. Raises what `parse` raises."""
        max_body = self.config.max_body_mib * MIB
        if request.content_length is not None and request.content_length > max_body:
            raise web.HTTPRequestEntityTooLarge(max_size=max_body)
        encoding = request.headers.get("Content-Encoding") or "identity"
        if encoding.lower() != "identity":
            raise RequestError(f"the body must be plain JSON, without Content-Encoding; got {encoding[:80]}.")
        try:
            body = await asyncio.wait_for(request.read(), record.time_left_s)
        except asyncio.TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        except web.RequestPayloadError as error:
            raise RequestError(f"the body cannot be read: {error}") from error
        if len(body) <= MAX_INLINE_BODY:
            return parse(body)
        return await self.compute(record, partial(parse, body))

    @asynccontextmanager
    async def deltas(
        self, record: RequestRecord, request_id: str, prompt: Prompt, params: SamplingParams, *, is_whole: bool
    ) -> AsyncIterator[Deltas]:
        """The engine's deltas of one prompt; its request is aborted at the end, unless it is done.

        `request_id` is the record's, or one of several made from it. Each delta comes at once, but where
        `is_whole` says that only the whole is wanted. Raises OverloadedError and FailureError.
        """
        if self.state.is_stopping:
            raise FailureError(STOPPING)
        self.check_queue()
        record.request_ids.append(request_id)
        if record.is_late:
            raise self.cut_short(record)
        self._waiting_ids.add(request_id)
        try:
            generated = self.engine.generate(
                request_id,
                prompt.text,
                params,
                prompt_token_ids=prompt.token_ids,
                add_special_tokens=prompt.add_special_tokens,
                is_whole=is_whole,
                on_end=record.end,
            )
            async with aclosing(generated) as deltas:
                yield deltas
        finally:
            self._waiting_ids.discard(request_id)

    def check_queue(self, num_new: int = 1) -> None:
        """Raises OverloadedError where no place is left for `num_new` requests.

        Those whose prompts are being tokenised wait, too; of the engine's queue they are no part yet.
        """
        most = self.config.max_waiting_requests
        if len(self._waiting_ids) + num_new <= most:
            return
        self._waiting_ids = {one for one in self._waiting_ids if self.engine.admission_time_s(one) is None}
        num_waiting = len(self._waiting_ids)
        if num_waiting + num_new > most:
            raise OverloadedError(f"{num_waiting} requests are waiting already (--max-waiting-requests); try later.")

    def cut_short(self, record: RequestRecord) -> CutShortError:
        """Where the engine has ended a request whose status is still open. Clients repeat a 408 by themselves."""
        if not record.is_late:
            return CutShortError(STOPPING)
        limit_s = self.config.request_timeout_s
        detail = f"the answer was not complete within {limit_s:g} s (--request-timeout-s)."
        return CutShortError(Failure(504, detail))

    async def close(self, app: web.Application) -> None:
        """Lets go of the thread that parses."""
        self._parser.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _time_limit(self, record: RequestRecord) -> Iterator[None]:
        """Has the engine end a request that is not done in time."""

        def end() -> None:
            record.is_late = True
            for request_id in record.request_ids:
                self.engine.abort(request_id)

        if self.config.request_timeout_s is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(self.config.request_timeout_s, end)
        try:
            yield
        finally:
            timer.cancel()
