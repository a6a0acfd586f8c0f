"""The web application of a server: what both protocols have in common. Knows neither of them.

A protocol brings its routes, the shape of its errors and the document that describes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vllm_lite.entrypoints.api_key import require_key
from vllm_lite.entrypoints.cross_origin import CrossOrigin
from vllm_lite.entrypoints.docs_page import DocsPage
from vllm_lite.entrypoints.failures import Failure, FailureError, FailureShape, failures_as
from vllm_lite.entrypoints.http_connection import refuse_other_versions
from vllm_lite.entrypoints.metrics import make_registry
from vllm_lite.entrypoints.request_id import add_request_id, identify
from vllm_lite.entrypoints.request_service import MIB, STOPPING, RequestService
from vllm_lite.entrypoints.responses import SERVER, json_response
from vllm_lite.entrypoints.stalled_readers import write_in_time


@dataclass(frozen=True)
class ApiProtocol:
    """What one of the two servers adds to the application."""

    routes: Iterable[web.RouteDef]
    failure_shape: FailureShape
    document: dict[str, Any]
    """Its OpenAPI document."""
    page: DocsPage
    """The same for people."""


API_PROTOCOL = web.AppKey("api_protocol", ApiProtocol)


def make_app(service: RequestService, protocol: ApiProtocol) -> web.Application:
    """The application with the protocol's routes and those that every server has."""
    config, routes = service.config, list(protocol.routes)
    cross_origin = CrossOrigin(config)
    middlewares: list[Middleware] = [
        identify,
        write_in_time(config.slow_client_s),
        service.refusals.count_at({route.path for route in routes if route.method == hdrs.METH_POST}),
        failures_as(protocol.failure_shape, config),
        refuse_other_versions,
        _refuse_when_stopping(service),
        cross_origin.check,
    ]
    if config.api_key is not None:
        middlewares.append(require_key(config.api_key))
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_mib * MIB)
    app[API_PROTOCOL] = protocol
    common = _CommonRoutes(service, protocol)
    app.add_routes(
        [
            *routes,
            web.get("/docs", common.docs),
            web.get("/health", common.health),
            web.get("/metrics", common.metrics),
            web.get("/openapi.json", common.openapi),
        ]
    )
    app.on_response_prepare.append(_name_no_versions)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(cross_origin.add_headers)
    app.on_cleanup.append(service.close)
    return app


class _CommonRoutes:
    def __init__(self, service: RequestService, protocol: ApiProtocol) -> None:
        self._engine = service.engine
        self._registry = make_registry(service.engine, service.model_names[0], service.refusals.counts)
        self._document = protocol.document
        self._page = protocol.page

    async def docs(self, request: web.Request) -> web.Response:
        """`GET /docs`: what the other routes take and answer, for people, with a panel to try it."""
        return web.Response(text=self._page.html, content_type="text/html", headers=self._page.headers)

    async def health(self, request: web.Request) -> web.Response:
        """`GET /health`: 200 exactly while the engine can serve."""
        if not self._engine.is_alive:
            raise FailureError(Failure(503, "the engine has stopped; restart the server."))
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`: Prometheus text."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, request: web.Request) -> web.Response:
        """`GET /openapi.json`: what the other routes take and answer."""
        return json_response(200, self._document)


def _refuse_when_stopping(service: RequestService) -> Middleware:
    """Connections that are kept alive outlive the listening socket."""

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        if service.state.is_stopping:
            raise FailureError(STOPPING)
        return await handler(request)

    return refuse


async def _name_no_versions(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER
