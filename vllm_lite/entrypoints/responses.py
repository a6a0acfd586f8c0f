"""Bodies of answers that are no generated text: JSON as vLLM 0.2.7 wrote it, and errors with their one key."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

JSON_HEADERS = {"Content-Type": "application/json"}
SERVER = "vllm_lite"
"""The header of that name, without versions: nobody needs to know which faults there may be."""


def json_response(status: int, value: dict[str, Any], **headers: str) -> web.Response:
    """Compact JSON in raw UTF-8, as vLLM 0.2.7 wrote it. Only an echo of a broken path or header has to be mended."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return web.Response(status=status, body=body, headers={**JSON_HEADERS, **headers})


def error_response(status: int, detail: str, **headers: str) -> web.Response:
    """Never a top-level key `error`: an old load tester would retry for ever. Of headers, `_` stands for `-`."""
    return json_response(status, {"detail": detail}, **{name.replace("_", "-"): headers[name] for name in headers})
