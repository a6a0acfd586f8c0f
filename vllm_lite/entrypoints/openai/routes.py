"""OpenAI's protocol on HTTP: completions and chats, whole and as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from aiohttp import web

from vllm_lite.entrypoints.json_style import COMPACT, ESCAPED, JsonStyle
from vllm_lite.entrypoints.openai.asked import Asked, as_client_names
from vllm_lite.entrypoints.openai.chat_answer import ChatFormat
from vllm_lite.entrypoints.openai.chat_request import parse_chat_request
from vllm_lite.entrypoints.openai.choices import ChoiceFormat, ChunkedChoices, Opening, Step, Usage, WholeChoices
from vllm_lite.entrypoints.openai.completion_answer import CompletionFormat
from vllm_lite.entrypoints.openai.completion_request import parse_completion_request
from vllm_lite.entrypoints.openai.events import DONE, EVENT_HEADERS, event, failure_event
from vllm_lite.entrypoints.openai.merged import merged
from vllm_lite.entrypoints.openai.models import Models
from vllm_lite.entrypoints.openai.token_texts import TokenTexts
from vllm_lite.entrypoints.request_log import RequestRecord
from vllm_lite.entrypoints.request_service import Deltas, RequestService
from vllm_lite.entrypoints.responses import JSON_HEADERS
from vllm_lite.entrypoints.stream_writer import StreamWriter
from vllm_lite.errors import RequestError
from vllm_lite.outputs import RequestDelta


@dataclass
class Job:
    """A request that is being answered."""

    asked: Asked
    record: RequestRecord
    choice_format: ChoiceFormat
    head: dict[str, bytes]
    """The fields that every object of the answer begins with."""
    style: JsonStyle
    has_output: bool = True
    """Whether what is generated is part of the answer."""
    usage: Usage = field(default_factory=Usage)

    def object(self, choices: list[bytes], usage: bytes | None) -> bytes:
        """An answer or a chunk. Without `usage` the field is left out."""
        fields = {**self.head, "choices": self.style.array(choices)}
        return self.style.object(fields if usage is None else {**fields, "usage": usage})


class Api:
    """The handlers of one server that generate."""

    def __init__(self, service: RequestService, models: Models) -> None:
        self._service = service
        self._models = models
        self._texts = TokenTexts(service.model.tokenizer)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        with self._service.record(request) as record:
            parse = partial(parse_completion_request, max_prompts=self._service.config.max_waiting_requests)
            asked = await self._service.read(request, record, parse)
            self._models.check(asked.model)
            style = _style(asked)
            choice_format = CompletionFormat(asked, self._texts, style)
            head = self._head(asked, f"cmpl-{record.request_id}", "text_completion")
            return await self._serve(request, Job(asked, record, choice_format, head, style, asked.has_output))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        with self._service.record(request) as record:
            asked = await self._service.read(request, record, parse_chat_request)
            self._models.check(asked.model)
            render = partial(asked.chat.rendered, self._service.model.chat_template)
            asked = replace(asked, prompts=(await self._service.compute(record, render),))
            style = _style(asked)
            choice_format = ChatFormat(asked.params.logprobs, self._texts, style)
            kind = "chat.completion" if asked.stream is None else "chat.completion.chunk"
            head = self._head(asked, f"chatcmpl-{record.request_id}", kind)
            return await self._serve(request, Job(asked, record, choice_format, head, style))

    def _head(self, asked: Asked, answer_id: str, kind: str) -> dict[str, bytes]:
        model = asked.model or self._service.model_names[0]
        fields = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
        return {key: _style(asked).value(value) for key, value in fields.items()}

    async def _serve(self, request: web.Request, job: Job) -> web.StreamResponse:
        prompts, record = job.asked.prompts, job.record
        record.prompt = prompts[0].text or ""
        self._service.check_queue(len(prompts))
        async with AsyncExitStack() as stack:
            sources = []
            for index, prompt in enumerate(prompts):
                request_id = record.request_id if len(prompts) == 1 else f"{record.request_id}-{index}"
                generated = self._service.deltas(
                    record, request_id, prompt, job.asked.params, is_whole=job.asked.stream is None
                )
                sources.append(self._steps(job, index, await stack.enter_async_context(generated)))
            steps = await stack.enter_async_context(aclosing(merged(sources)))
            if job.asked.stream is None:
                return await self._answer(job, steps)
            return await self._stream(request, job, steps)

    async def _steps(self, job: Job, prompt_index: int, deltas: Deltas) -> AsyncGenerator[tuple[Step, Opening], None]:
        """What comes of one prompt, and what its choices begin with. Raises CutShortError where the engine ended it."""
        if job.record.is_late:  # the time ended before this prompt had its turn
            raise self._service.cut_short(job.record)
        opening: Opening | None = None
        try:
            async for delta in deltas:
                job.record.add(delta)
                if any(output.finish_reason == "abort" for output in delta.outputs):
                    raise self._service.cut_short(job.record)
                ids = self._service.engine.prompt_token_ids(delta.request_id)
                step = Step(prompt_index, ids, delta if job.has_output else _without_output(delta))
                if opening is None:
                    begin = partial(job.choice_format.opening, step)
                    opening = (
                        begin() if delta.prompt_logprobs is None else await self._service.compute(job.record, begin)
                    )
                yield step, opening
        except RequestError as error:
            raise _located(error, job.asked, prompt_index) from error

    async def _answer(self, job: Job, steps: AsyncIterator[tuple[Step, Opening]]) -> web.StreamResponse:
        params = job.asked.params
        choices = WholeChoices(job.choice_format, len(job.asked.prompts), params.n)
        async for step, opening in steps:
            job.usage.add(step)
            choices.add(step, opening)
        body = job.object(choices.json(), job.style.value(job.usage.counts()))
        return web.Response(body=body, headers=JSON_HEADERS)

    async def _stream(
        self, request: web.Request, job: Job, steps: AsyncIterator[tuple[Step, Opening]]
    ) -> web.StreamResponse:
        options, slow_client_s = job.asked.stream, self._service.config.slow_client_s
        assert options is not None
        choices = ChunkedChoices(job.choice_format, job.asked.params.n)
        writer = StreamWriter(request, EVENT_HEADERS, job.record, slow_client_s, last_words=failure_event)
        # Until all prompts are known to be valid, a mistake in one of them has a status of its own.
        unchecked, held = set(job.record.request_ids), b""
        async with writer:
            async for step, opening in steps:
                job.usage.add(step)
                usage = _running_usage(job)
                held += b"".join(event(job.object([chunk], usage)) for chunk in choices.add(step, opening))
                unchecked = self._still_unchecked(unchecked, step)
                if held and not unchecked:
                    message, held = held, b""
                    await writer.write(message)
            if options.has_usage:
                held += event(job.object([], job.style.value(job.usage.counts())))
            await writer.write(held + DONE)
        return writer.response

    def _still_unchecked(self, request_ids: set[str], step: Step) -> set[str]:
        """Those of the engine's requests that it has not accepted yet: the prompts of others have ids."""
        has_ids = self._service.engine.prompt_token_ids
        return {one for one in request_ids if one != step.delta.request_id and not has_ids(one)}


def _style(asked: Asked) -> JsonStyle:
    return COMPACT if asked.stream is None else ESCAPED


def _running_usage(job: Job) -> bytes | None:
    """What a chunk says of the numbers of tokens."""
    options = job.asked.stream
    if options is None or not options.has_usage:
        return None
    return job.style.value(job.usage.counts() if options.has_running_usage else None)


def _located(error: RequestError, asked: Asked, prompt_index: int) -> RequestError:
    """The error in the client's words, with the place of the prompt among several."""
    names = asked.field_names
    if len(asked.prompts) > 1 and error.param == "prompt":
        return RequestError(f"prompt[{prompt_index}]" + str(error).removeprefix("prompt"), "prompt")
    return as_client_names(error, names)


def _without_output(delta: RequestDelta) -> RequestDelta:
    """Its candidates are cut off before the one token that they have."""
    outputs = tuple(
        replace(output, text="", token_ids=(), logprobs=None if output.logprobs is None else (), finish_reason="length")
        for output in delta.outputs
    )
    return replace(delta, outputs=outputs)
