"""`GET /v1/models`: the one model, under each of its names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from vllm_lite.entrypoints.failures import Failure, FailureError
from vllm_lite.entrypoints.responses import json_response


class Models:
    """The names by which clients may know the model."""

    def __init__(self, names: Sequence[str], max_model_len: int) -> None:
        self._cards = {name: self._card(name, names[0], max_model_len) for name in names}

    async def list_all(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return json_response(200, {"object": "list", "data": list(self._cards.values())})

    async def retrieve(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{name}`; a name may have slashes."""
        name = request.match_info["name"]
        self.check(name)
        return json_response(200, self._cards[name])

    def check(self, name: str | None) -> None:
        """Raises FailureError where a client names another model. None is this one."""
        if name is not None and name not in self._cards:
            served = ", ".join(self._cards)
            detail = f"the model {name[:200]!r} does not exist; this server has {served} (--served-model-name)."
            raise FailureError(Failure(404, detail, "model", code="model_not_found"))

    def _card(self, name: str, root: str, max_model_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm_lite",
            "root": root,
            "max_model_len": max_model_len,
        }
