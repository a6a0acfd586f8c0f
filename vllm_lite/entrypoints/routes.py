"""The HTTP surface: routes, status codes, headers and bodies. Knows the engine only as `ServedEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vllm_lite.config import EngineConfig, ServerConfig
from vllm_lite.entrypoints.answer import COMPACT, Answer
from vllm_lite.entrypoints.api_key import require_key
from vllm_lite.entrypoints.cross_origin import CrossOrigin
from vllm_lite.entrypoints.metrics import make_registry
from vllm_lite.entrypoints.openapi import openapi_document
from vllm_lite.entrypoints.request_body import GenerateRequest, parse_generate_request
from vllm_lite.entrypoints.request_id import (
    add_request_id,
    client_request_id,
    current_request_id,
    identify,
    new_request_id,
)
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.entrypoints.responses import JSON_HEADERS, error_response, json_response
from vllm_lite.entrypoints.served_engine import ServedEngine
from vllm_lite.entrypoints.stalled_readers import cut_when_stalled, write_in_time
from vllm_lite.entrypoints.streaming import DELIMITERS, StreamMessages, is_message, stream_messages
from vllm_lite.errors import EngineDeadError, OverloadedError, RequestError, RequestFailedError
from vllm_lite.outputs import RequestDelta

Deltas = AsyncIterator[RequestDelta]

MIB = 2**20
MAX_INLINE_BODY = 64 * 1024
"""Bytes of a body that the event loop parses itself: a few milliseconds at most."""
STREAM_HEADERS = {
    "Content-Type": "application/octet-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the messages
}
RETRY_AFTER_S = 1
"""What a client is told that was refused because too many wait: places become free at every step."""
STOPPING = "the server is stopping; send the request to another one or wait for its restart."


@dataclass
class ServerState:
    """What the handlers need to know about the life of the server."""

    is_stopping: bool = False


class Api:
    """The handlers of one server."""

    def __init__(
        self,
        engine: ServedEngine,
        model_name: str,
        state: ServerState,
        engine_config: EngineConfig,
        config: ServerConfig,
    ) -> None:
        self._engine = engine
        self._state = state
        self._engine_config = engine_config
        self._config = config
        self._max_body = config.max_body_mib * MIB
        self._delimiter = DELIMITERS[config.stream_delimiter]
        self._registry = make_registry(engine, model_name)
        self._document = openapi_document(engine_config, config)
        self._waiting_ids: set[str] = set()
        """Of the requests that are open, and had not left the queue when `_check_queue` last looked."""
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")

    def make_app(self) -> web.Application:
        """The application with its routes."""
        cross_origin = CrossOrigin(self._config)
        middlewares: list[Middleware] = [
            identify,
            write_in_time(self._config.slow_client_s),
            self._errors_as_json,
            self._refuse_when_stopping,
            cross_origin.check,
        ]
        if self._config.api_key is not None:
            middlewares.append(require_key(self._config.api_key))
        app = web.Application(middlewares=middlewares, client_max_size=self._max_body)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/openapi.json", self.openapi),
            ]
        )
        app.on_response_prepare.append(_name_no_versions)
        app.on_response_prepare.append(add_request_id)
        app.on_response_prepare.append(cross_origin.add_headers)
        app.on_cleanup.append(self._close)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /generate`: one JSON answer, or a stream of messages."""
        client_id = client_request_id(request)
        request_id = new_request_id() if client_id else current_request_id()  # two clients may choose the same one
        with RequestRecord(request_id, self._engine_config, client_id) as record, self._time_limit(record):
            self._check_queue()  # before memory is spent on the body, too
            asked = await self._read(request)
            record.prompt = asked.prompt
            if self._state.is_stopping:
                raise EngineDeadError(STOPPING)
            self._check_queue()
            if record.is_late:
                return self._cut_short(record)
            self._waiting_ids.add(record.request_id)
            try:
                deltas = self._engine.generate(record.request_id, asked.prompt, asked.params, on_end=record.end)
                async with aclosing(deltas):
                    answer = self._stream if asked.is_stream else self._answer
                    return await answer(request, asked, deltas, record)
            finally:
                self._waiting_ids.discard(record.request_id)

    async def health(self, request: web.Request) -> web.Response:
        """`GET /health`: 200 exactly while the engine can serve."""
        if not self._engine.is_alive:
            return error_response(503, "the engine has stopped; restart the server.")
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`: Prometheus text."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, request: web.Request) -> web.Response:
        """`GET /openapi.json`: what the other routes take and answer."""
        return json_response(200, self._document)

    def _check_queue(self) -> None:
        """Those whose prompts are being tokenised wait, too; of the engine's queue they are no part yet."""
        if len(self._waiting_ids) < self._config.max_waiting_requests:
            return
        self._waiting_ids = {one for one in self._waiting_ids if self._engine.admission_time_s(one) is None}
        num_waiting = len(self._waiting_ids)
        if num_waiting >= self._config.max_waiting_requests:
            raise OverloadedError(f"{num_waiting} requests are waiting already (--max-waiting-requests); try later.")

    async def _read(self, request: web.Request) -> GenerateRequest:
        if request.content_length is not None and request.content_length > self._max_body:
            raise web.HTTPRequestEntityTooLarge(max_size=self._max_body)
        encoding = request.headers.get("Content-Encoding") or "identity"
        if encoding.lower() != "identity":
            raise RequestError(f"the body must be plain JSON, without Content-Encoding; got {encoding[:80]}.")
        try:
            body = await asyncio.wait_for(request.read(), self._config.request_timeout_s)
        except asyncio.TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        except web.RequestPayloadError as error:
            raise RequestError(f"the body cannot be read: {error}") from error
        if len(body) <= MAX_INLINE_BODY:
            return parse_generate_request(body)
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse_generate_request, body)

    @contextmanager
    def _time_limit(self, record: RequestRecord) -> Iterator[None]:
        """Has the engine end a request that is not done in time."""

        def end() -> None:
            record.is_late = True
            self._engine.abort(record.request_id)

        if self._config.request_timeout_s is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(self._config.request_timeout_s, end)
        try:
            yield
        finally:
            timer.cancel()

    def _cut_short(self, record: RequestRecord) -> web.Response:
        """Where the engine has ended a request and its status is still open. Clients repeat a 408 by themselves."""
        if record.is_late:
            limit_s = self._config.request_timeout_s
            return error_response(504, f"the answer was not complete within {limit_s:g} s (--request-timeout-s).")
        return error_response(503, STOPPING)

    async def _answer(
        self, request: web.Request, asked: GenerateRequest, deltas: Deltas, record: RequestRecord
    ) -> web.StreamResponse:
        answer: Answer | None = None
        async for delta in deltas:
            record.add(delta)
            if answer is None:  # not before the engine has accepted n, which may be any number
                ids = self._engine.prompt_token_ids(record.request_id)
                answer = Answer(asked.prompt, ids, asked.params.n, COMPACT, has_details=asked.has_details)
            answer.add(delta)
        if answer is None or record.is_aborted:
            return self._cut_short(record)
        return web.Response(body=answer.json(has_prompt_details=True), headers=JSON_HEADERS)

    async def _stream(
        self, request: web.Request, asked: GenerateRequest, deltas: Deltas, record: RequestRecord
    ) -> web.StreamResponse:
        """Sends nothing, not even a header, before the first message: until then a failure has a status of its own."""
        messages: StreamMessages | None = None
        response = web.StreamResponse(headers=STREAM_HEADERS)
        if request.version < HttpVersion11:  # which has no chunks: the end of the connection is the end of the stream
            response.force_close()
        try:
            async for delta in deltas:
                record.add(delta)
                if messages is None:  # not before the engine has accepted n, which may be any number
                    messages = stream_messages(
                        asked.prompt,
                        self._engine.prompt_token_ids(record.request_id),
                        asked.params,
                        has_details=asked.has_details,
                        is_deltas=asked.is_deltas,
                    )
                if is_message(delta, has_details=asked.has_details):
                    await response.prepare(request)
                    with cut_when_stalled(request, self._config.slow_client_s):
                        await response.write(messages.add(delta) + self._delimiter)
        except ConnectionResetError as error:  # nobody is left to read
            record.error = error
            return response
        except (RequestFailedError, EngineDeadError) as error:
            if not response.prepared:
                raise
            record.error = error
            _close_without_last_chunk(request)
        return response if response.prepared else self._cut_short(record)

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            return error_response(400, str(error))
        except RequestFailedError as error:
            return error_response(500, str(error))
        except EngineDeadError as error:
            return error_response(503, str(error))
        except OverloadedError as error:
            return error_response(503, str(error), Retry_After=str(RETRY_AFTER_S))
        except web.HTTPRequestTimeout:
            limit_s = self._config.request_timeout_s
            response = error_response(408, f"the body did not arrive within {limit_s:g} s (--request-timeout-s).")
            response.force_close()
            return response
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"the body is larger than {self._config.max_body_mib} MiB (--max-body-mib).")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            detail = f"{request.method} is not allowed for {request.path}; allowed: {allowed}."
            return error_response(405, detail, Allow=allowed)
        except web.HTTPNotFound:
            known = "/generate, /health, /metrics and /openapi.json"
            return error_response(404, f"{request.path} does not exist; there are {known}.")

    @web.middleware
    async def _refuse_when_stopping(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Connections that are kept alive outlive the listening socket."""
        if not self._state.is_stopping:
            return await handler(request)
        response = error_response(503, STOPPING)
        response.force_close()
        return response

    async def _close(self, app: web.Application) -> None:
        self._parser.shutdown(wait=False, cancel_futures=True)


def _close_without_last_chunk(request: web.Request) -> None:
    """The status has been sent: a stream without its end is how a client of HTTP sees that it failed."""
    if request.transport is not None:
        request.transport.close()


async def _name_no_versions(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "vllm_lite"
