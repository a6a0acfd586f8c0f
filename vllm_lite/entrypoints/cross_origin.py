"""Which web pages may call the server, and what browsers are told of it (CORS). Scripts name no origin."""

from __future__ import annotations

import ipaddress
import re

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from vllm_lite.config import ServerConfig
from vllm_lite.entrypoints.failures import Failure, FailureError

PORT = re.compile(r":[0-9]*$")
READABLE_HEADERS = "X-Request-Id, Retry-After"
"""What a page may read of an answer's headers, beside those that it always may."""


class CrossOrigin:
    """The rules of one server. Without `--allowed-origins`, foreign pages get nothing, and nobody a CORS header."""

    def __init__(self, config: ServerConfig) -> None:
        self._allowed = {_normal_origin(origin) for origin in config.allowed_origins}
        self._methods = ", ".join(config.allowed_methods)
        self._headers = ", ".join(config.allowed_headers)

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses foreign pages and answers preflights, which carry no key."""
        origins = request.headers.getall(hdrs.ORIGIN, ())
        for origin in origins:
            if not _is_own(request, origin) and not self._is_allowed(origin):
                detail = f"pages of {origin} may not call this server; see --allowed-origins."
                raise FailureError(Failure(403, detail))
        is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if is_preflight and any(self._is_allowed(origin) for origin in origins):
            headers = {
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: self._methods,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: self._headers,
            }
            return web.Response(status=204, headers=headers)
        return await handler(request)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """To be called before the headers of any answer are sent: a page may read errors, too."""
        if not self._allowed:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)  # for caches, even where this request named no origin
        origins = request.headers.getall(hdrs.ORIGIN, ())
        if len(origins) == 1 and self._is_allowed(origins[0]):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origins[0]
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = READABLE_HEADERS

    def _is_allowed(self, origin: str) -> bool:
        """A browser writes an origin in ASCII, and no header could echo another one."""
        return _normal_origin(origin) in self._allowed or ("*" in self._allowed and origin.isascii())


def _is_own(request: web.Request, origin: str) -> bool:
    """Whether a page comes from this server, as far as that is certain.

    A name in both headers proves nothing: whoever owns a name can have it point here once the page is loaded.
    """
    host = request.headers.get(hdrs.HOST, "")
    if _normal_origin(origin) != _normal_origin(f"{request.scheme}://{host}"):
        return False
    name = host.rpartition(":")[0] if PORT.search(host) else host
    return name.lower() == "localhost" or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _normal_origin(origin: str) -> str:
    """Case, a slash at the end and the scheme's own port make no difference."""
    origin = origin.lower().rstrip("/")
    default_port = ":80" if origin.startswith("http://") else ":443"
    return origin.removesuffix(default_port)
