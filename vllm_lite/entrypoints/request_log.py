"""What the server says about requests: one line each, and one with statistics every few seconds under load.

Never a prompt, unless `--max-log-len` asks for its beginning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager
from types import TracebackType

from aiohttp import web

from vllm_lite.config import EngineConfig
from vllm_lite.entrypoints.served_engine import ServedEngine
from vllm_lite.errors import RequestError
from vllm_lite.outputs import RequestDelta

logger = logging.getLogger(__name__)


class RequestRecord(AbstractContextManager["RequestRecord"]):
    """Follows one request and writes its line at the end, however that comes."""

    def __init__(self, request_id: str, config: EngineConfig) -> None:
        self.request_id = request_id
        self.error: BaseException | None = None
        """What ended the request, where it was not raised to the record's block."""
        self._is_logged = not config.disable_log_requests
        self._max_log_len = config.max_log_len
        self.prompt = ""
        self._num_output_tokens = 0
        self._finish_reason = "unfinished"
        self._arrival = time.monotonic()
        self._first_token: float | None = None

    def add(self, delta: RequestDelta) -> None:
        """Takes note of what a step added."""
        num_tokens = sum(len(output.token_ids) for output in delta.outputs)
        if num_tokens and self._first_token is None:
            self._first_token = time.monotonic()
        self._num_output_tokens += num_tokens
        reasons = [output.finish_reason for output in delta.outputs if output.finish_reason]
        if reasons:
            self._finish_reason = ", ".join(reasons)

    @property
    def is_aborted(self) -> bool:
        """Whether the engine ended the request before it was done."""
        return self._finish_reason == "abort"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_logged:
            logger.info("%s", self._line(error or self.error))

    def _line(self, error: BaseException | None) -> str:
        now = time.monotonic()
        first = "none" if self._first_token is None else f"{self._first_token - self._arrival:.3f} s"
        line = (
            f"request {self.request_id}: {self._num_output_tokens} output tokens, "
            f"first token {first}, total {now - self._arrival:.3f} s, {self._reason(error)}"
        )
        return line if self._max_log_len is None else f"{line}, prompt {self.prompt[: self._max_log_len]!r}"

    def _reason(self, error: BaseException | None) -> str:
        if error is None:
            return self._finish_reason
        if isinstance(error, (asyncio.CancelledError, ConnectionError)):
            return "client left"
        outcome = "refused" if isinstance(error, (RequestError, web.HTTPException)) else "failed"
        return f"{outcome}: {str(error)[:200]!r}"


async def log_statistics(engine: ServedEngine, interval_s: float = 10.0) -> None:
    """Writes a line each interval in which the engine computed something. Runs until it is cancelled."""
    before = engine.stats()
    while True:
        await asyncio.sleep(interval_s)
        now = engine.stats()
        num_prompt = now.num_prompt_tokens - before.num_prompt_tokens
        num_generated = now.num_generated_tokens - before.num_generated_tokens
        if num_prompt or num_generated:
            used = 1 - now.num_free_blocks / now.num_total_blocks
            logger.info(
                "%d running, %d waiting, %.0f prompt tokens/s, %.0f output tokens/s, KV cache %.0f%% used",
                now.num_running,
                now.num_waiting,
                num_prompt / interval_s,
                num_generated / interval_s,
                100 * used,
            )
        before = now
