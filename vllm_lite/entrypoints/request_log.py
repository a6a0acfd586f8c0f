"""One line in the log for each request: never its prompt, unless `--max-log-len` asks for the beginning.

Its tokens are those that the engine has computed and counted, so that the lines add up to `/metrics`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import AbstractContextManager
from types import TracebackType

from aiohttp import web

from vllm_lite.config import EngineConfig
from vllm_lite.errors import OverloadedError, RequestError
from vllm_lite.outputs import FinishReason, RequestDelta, RequestTally

logger = logging.getLogger(__name__)


class RequestRecord(AbstractContextManager["RequestRecord"]):
    """Follows one request and writes its line at the end, however that comes."""

    def __init__(self, request_id: str, config: EngineConfig, client_id: str | None = None) -> None:
        self.request_id = request_id
        """The engine's, which is in its messages; a client may know the request by another one."""
        self._name = request_id if client_id is None else f"{client_id} ({request_id})"
        self.error: BaseException | None = None
        """What ended the request, where it was not raised to the record's block."""
        self.is_late = False
        """Whether its time was over before it was."""
        self._is_logged = not config.disable_log_requests
        self._max_log_len = config.max_log_len
        self.prompt = ""
        self._tally: RequestTally | None = None
        self._finish_reasons: dict[int, FinishReason | None] = {}
        """Of each candidate, None while it is being generated."""
        self._arrival_s = time.monotonic()
        self._first_token_s: float | None = None

    def add(self, delta: RequestDelta) -> None:
        """Takes note of what a step added."""
        if self._first_token_s is None and any(output.token_ids for output in delta.outputs):
            self._first_token_s = time.monotonic()
        if any(output.parent is not None for output in delta.outputs):  # it has all the candidates there are now
            self._finish_reasons.clear()
        for output in delta.outputs:
            self._finish_reasons[output.index] = output.finish_reason

    def end(self, tally: RequestTally) -> None:
        """Takes note of what the engine has counted, so that the log and `/metrics` agree."""
        self._tally = tally

    @property
    def is_aborted(self) -> bool:
        """Whether the engine ended the request before all of its candidates were done."""
        return "abort" in self._finish_reasons.values()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_logged:
            logger.info("%s", self._line(error or self.error))

    def _line(self, error: BaseException | None) -> str:
        tally = self._tally
        line = (
            f"request {self._name}: {tally.num_prompt_tokens if tally else 0} prompt tokens, "
            f"{tally.num_generated_tokens if tally else 0} output tokens, {self._queued()}, "
            f"first token {self._until(self._first_token_s)}, total {self._until(time.monotonic())}, "
            f"{self._reason(error)}"
        )
        return line if self._max_log_len is None else f"{line}, prompt {self.prompt[: self._max_log_len]!r}"

    def _queued(self) -> str:
        if self._tally is None:
            return "not queued"
        if self._tally.admission_time_s is None:
            return "queued to its end"
        return f"queued {self._until(self._tally.admission_time_s)}"

    def _until(self, time_s: float | None) -> str:
        return "never" if time_s is None else f"{time_s - self._arrival_s:.3f} s"

    def _reason(self, error: BaseException | None) -> str:
        if error is None:
            counts = Counter(reason for reason in self._finish_reasons.values() if reason is not None)
            words = [reason if count == 1 else f"{reason} x {count}" for reason, count in counts.items()]
            if self.is_late and (self.is_aborted or not words):
                words.append("timed out")
            return ", ".join(words) or "unfinished"
        if isinstance(error, (asyncio.CancelledError, ConnectionError)):
            if self._tally is None or self._tally.outcome == "abort":
                return "client left"
            return f"client left after the end: {self._tally.outcome}"
        outcome = "refused" if isinstance(error, (RequestError, OverloadedError, web.HTTPException)) else "failed"
        return f"{outcome}: {str(error)[:200]!r}"
