"""Bodies of answers that are no generated text: JSON as vLLM 0.2.7 wrote it."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

JSON_HEADERS = {"Content-Type": "application/json"}
SERVER = "vllm_lite"
"""The header of that name, without versions: nobody needs to know which faults there may be."""


def json_response(status: int, value: dict[str, Any], **headers: str) -> web.Response:
    """Compact JSON in raw UTF-8. Only an echo of a broken path or header has to be mended."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return web.Response(status=status, body=body, headers={**JSON_HEADERS, **headers})
