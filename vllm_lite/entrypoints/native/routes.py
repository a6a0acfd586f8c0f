"""The native protocol on HTTP: `POST /generate`, its answers, streams and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from vllm_lite.entrypoints.app import ApiProtocol, make_app
from vllm_lite.entrypoints.docs_page import docs_page
from vllm_lite.entrypoints.failures import Failure
from vllm_lite.entrypoints.json_style import COMPACT
from vllm_lite.entrypoints.launch import ServerProgram
from vllm_lite.entrypoints.native.answer import Answer
from vllm_lite.entrypoints.native.docs import native_description
from vllm_lite.entrypoints.native.openapi import STREAM_TYPE, openapi_document
from vllm_lite.entrypoints.native.request_body import GenerateRequest, parse_generate_request
from vllm_lite.entrypoints.native.streaming import DELIMITERS, StreamMessages, is_message, stream_messages
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.entrypoints.request_service import Prompt, RequestService
from vllm_lite.entrypoints.responses import JSON_HEADERS
from vllm_lite.entrypoints.stream_writer import UNBUFFERED, StreamWriter
from vllm_lite.outputs import RequestDelta

STREAM_HEADERS = {"Content-Type": STREAM_TYPE, **UNBUFFERED}


def make_native_app(service: RequestService) -> web.Application:
    """The application of the native server."""
    document = openapi_document(service.engine_config, service.config)
    routes = [web.post("/generate", Api(service).generate)]
    page = docs_page(native_description(document, service.model_names[0], service.config))
    return make_app(service, ApiProtocol(routes, native_failure, document, page))


def native_failure(failure: Failure) -> dict[str, str]:
    """Never a top-level key `error`: an old load tester would retry for ever."""
    return {"detail": failure.detail}


NATIVE = ServerProgram(
    module="vllm_lite.entrypoints.api_server",
    description="Serves a language model over the native POST /generate protocol.",
    make_app=make_native_app,
    example_path="/generate",
    example={"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0},
)


class Api:
    """The handler of one server."""

    def __init__(self, service: RequestService) -> None:
        self._service = service
        self._delimiter = DELIMITERS[service.config.stream_delimiter]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /generate`: one JSON answer, or a stream of messages."""
        with self._service.record(request) as record:
            asked = await self._service.read(request, record, parse_generate_request)
            record.prompt = asked.prompt
            prompt = Prompt(asked.prompt)
            generated = self._service.deltas(
                record, record.request_id, prompt, asked.params, is_whole=not asked.is_stream
            )
            async with generated as deltas:
                if asked.is_stream:
                    return await self._stream(request, asked, deltas, record)
                return await self._answer(asked, deltas, record)

    async def _answer(
        self, asked: GenerateRequest, deltas: AsyncIterator[RequestDelta], record: RequestRecord
    ) -> web.StreamResponse:
        answer: Answer | None = None
        async for delta in deltas:
            record.add(delta)
            if answer is None:  # not before the engine has accepted n, which may be any number
                ids = self._service.engine.prompt_token_ids(record.request_id)
                answer = Answer(asked.prompt, ids, asked.params.n, COMPACT, has_details=asked.has_details)
            answer.add(delta)
        if answer is None or record.is_aborted:
            raise self._service.cut_short(record)
        return web.Response(body=answer.json(has_prompt_details=True), headers=JSON_HEADERS)

    async def _stream(
        self, request: web.Request, asked: GenerateRequest, deltas: AsyncIterator[RequestDelta], record: RequestRecord
    ) -> web.StreamResponse:
        messages: StreamMessages | None = None
        async with StreamWriter(request, STREAM_HEADERS, record, self._service.config.slow_client_s) as writer:
            async for delta in deltas:
                record.add(delta)
                if messages is None:  # not before the engine has accepted n, which may be any number
                    ids = self._service.engine.prompt_token_ids(record.request_id)
                    if not ids:  # it was ended before it was queued
                        break
                    messages = stream_messages(
                        asked.prompt,
                        ids,
                        asked.params,
                        has_details=asked.has_details,
                        is_deltas=asked.is_deltas,
                    )
                if is_message(delta, has_details=asked.has_details):
                    await writer.write(messages.add(delta) + self._delimiter)
        if not writer.has_outcome:
            raise self._service.cut_short(record)
        return writer.response
