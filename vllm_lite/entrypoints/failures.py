"""What goes wrong with a request, as a status and a sentence. Each protocol gives it a shape of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vllm_lite.config import ServerConfig
from vllm_lite.entrypoints.responses import json_response
from vllm_lite.errors import EngineDeadError, OverloadedError, RequestError, RequestFailedError

RETRY_AFTER_S = 1
"""What a client is told that was refused because too many wait: places become free at every step."""


@dataclass(frozen=True)
class Failure:
    """A status of 400 or more, and what a client is told."""

    status: int
    detail: str
    param: str | None = None
    """The field of the body that it is about, if it is about one."""
    headers: Mapping[str, str] = field(default_factory=dict)
    closes_connection: bool = False
    code: str | None = None
    """A word for what is wrong, for protocols whose clients go by one."""


FailureShape = Callable[[Failure], dict[str, Any]]
"""Makes the JSON body of a failure."""


class FailureError(Exception):
    """Ends a request with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class CutShortError(FailureError):
    """The engine has ended the request before its answer was complete."""


ENGINE_ERRORS = (FailureError, RequestError, RequestFailedError, EngineDeadError, OverloadedError)
HTTP_ERRORS = (web.HTTPRequestTimeout, web.HTTPRequestEntityTooLarge, web.HTTPMethodNotAllowed, web.HTTPNotFound)
"""Those of aiohttp's that a request can run into here."""


def failures_as(shape: FailureShape, config: ServerConfig) -> Middleware:
    """A middleware that turns every error that a client may see into an answer."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ENGINE_ERRORS as error:
            failure = failure_of(error)
        except HTTP_ERRORS as error:
            failure = http_failure(request, error, config)
        return failure_response(failure, shape)

    return answer


def failure_response(failure: Failure, shape: FailureShape) -> web.Response:
    """What the client gets."""
    response = json_response(failure.status, shape(failure), **failure.headers)
    if failure.closes_connection:
        response.force_close()
    return response


def failure_of(error: Exception) -> Failure:
    """Of an error that the engine or a handler raises."""
    if isinstance(error, FailureError):
        return error.failure
    if isinstance(error, RequestError):
        return Failure(400, str(error), error.param)
    if isinstance(error, OverloadedError):
        return Failure(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)})
    return Failure(503 if isinstance(error, EngineDeadError) else 500, str(error))


def http_failure(request: web.Request, error: web.HTTPException, config: ServerConfig) -> Failure:
    """Of an error that aiohttp raises."""
    if isinstance(error, web.HTTPRequestTimeout):
        detail = f"the body did not arrive within {config.request_timeout_s:g} s (--request-timeout-s)."
        return Failure(408, detail, closes_connection=True)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Failure(413, f"the body is larger than {config.max_body_mib} MiB (--max-body-mib).")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        detail = f"{request.method} is not allowed for {request.path}; allowed: {allowed}."
        return Failure(405, detail, headers={"Allow": allowed})
    *paths, last = (resource.canonical for resource in request.app.router.resources())
    return Failure(404, f"{request.path} does not exist; there are {', '.join(paths)} and {last}.")
