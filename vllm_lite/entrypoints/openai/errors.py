"""OpenAI's shape of a failure. Its clients choose the class of their exception by the status."""

from __future__ import annotations

from typing import Any

from vllm_lite.entrypoints.failures import Failure

INVALID_REQUEST = "invalid_request_error"
TYPES = {401: "authentication_error", 403: "permission_error"}
CODES = {401: "invalid_api_key"}


def openai_failure(failure: Failure) -> dict[str, Any]:
    """`param` is the field that it is about, `code` a word for it; both are null where there is none."""
    kind = TYPES.get(failure.status, "server_error" if failure.status >= 500 else INVALID_REQUEST)
    code = failure.code or CODES.get(failure.status)
    return {"error": {"message": failure.detail, "type": kind, "param": failure.param, "code": code}}
