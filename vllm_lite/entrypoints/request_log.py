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
from vllm_lite.entrypoints.failures import CutShortError, FailureError
from vllm_lite.errors import OverloadedError, RequestError
from vllm_lite.outputs import FinishReason, RequestDelta, RequestTally

logger = logging.getLogger(__name__)


class RequestRecord(AbstractContextManager["RequestRecord"]):
    """Follows one request and writes its line at the end, however that comes."""

    def __init__(
        self, request_id: str, config: EngineConfig, client_id: str | None = None, time_limit_s: float | None = None
    ) -> None:
        self.request_id = request_id
        """The engine's, which is in its messages; a client may know the request by another one."""
        self.request_ids: list[str] = []
        """What the engine has been asked: one request, or one for each of several prompts."""
        self._name = request_id if client_id is None else f"{client_id} ({request_id})"
        self.error: BaseException | None = None
        """What ended the request, where it was not raised to the record's block."""
        self.is_late = False
        """Whether its time was over before it was."""
        self._is_logged = not config.disable_log_requests
        self._max_log_len = config.max_log_len
        self.prompt = ""
        self._tallies: list[RequestTally] = []
        """Of those of the engine's requests that had been queued and have ended."""
        self._finish_reasons: dict[str, dict[int, FinishReason | None]] = {}
        """Of each candidate of each of the engine's requests, None while it is being generated."""
        self._arrival_s = time.monotonic()
        self._time_limit_s = time_limit_s

    def add(self, delta: RequestDelta) -> None:
        """Takes note of what a step added."""
        if delta.has_parents:
            self._finish_reasons.pop(delta.request_id, None)
        reasons = self._finish_reasons.setdefault(delta.request_id, {})
        for output in delta.outputs:
            reasons[output.index] = output.finish_reason

    def end(self, tally: RequestTally) -> None:
        """Takes note of what the engine has counted, so that the log and `/metrics` agree."""
        self._tallies.append(tally)

    @property
    def time_left_s(self) -> float | None:
        """How long it may still take; None where it may take any time."""
        if self._time_limit_s is None:
            return None
        return max(0.0, self._arrival_s + self._time_limit_s - time.monotonic())

    @property
    def was_queued(self) -> bool:
        """Whether the engine accepted any of it, and counts it. To be asked for once it has ended."""
        return bool(self._tallies)

    @property
    def is_aborted(self) -> bool:
        """Whether the engine ended the request before all of its candidates were done."""
        return any("abort" in reasons.values() for reasons in self._finish_reasons.values())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_logged:
            logger.info("%s", self._line(error or self.error))

    def _line(self, error: BaseException | None) -> str:
        line = (
            f"request {self._name}: {sum(tally.num_prompt_tokens for tally in self._tallies)} prompt tokens, "
            f"{sum(tally.num_generated_tokens for tally in self._tallies)} output tokens, {self._queued()}, "
            f"first token {self._until(self._first_token_s)}, total {self._until(time.monotonic())}, "
            f"{self._reason(error)}"
        )
        return line if self._max_log_len is None else f"{line}, prompt {self.prompt[: self._max_log_len]!r}"

    def _queued(self) -> str:
        if not self._tallies:
            return "not queued"
        times_s = [tally.admission_time_s for tally in self._tallies if tally.admission_time_s is not None]
        return f"queued {self._until(min(times_s))}" if times_s else "queued to its end"

    @property
    def _first_token_s(self) -> float | None:
        return min(
            (one.first_token_time_s for one in self._tallies if one.first_token_time_s is not None), default=None
        )

    def _until(self, time_s: float | None) -> str:
        return "never" if time_s is None else f"{time_s - self._arrival_s:.3f} s"

    def _reason(self, error: BaseException | None) -> str:
        if error is None or isinstance(error, CutShortError):
            reasons = (reason for one in self._finish_reasons.values() for reason in one.values())
            counts = Counter(reason for reason in reasons if reason is not None)
            words = [reason if count == 1 else f"{reason} x {count}" for reason, count in counts.items()]
            if self.is_late and (self.is_aborted or not words):
                words.append("timed out")
            return ", ".join(words) or "unfinished"
        if isinstance(error, (asyncio.CancelledError, ConnectionError)):
            outcomes = {tally.outcome for tally in self._tallies}
            if not outcomes or "abort" in outcomes:
                return "client left"
            return f"client left after the end: {', '.join(sorted(outcomes))}"
        refusals = (RequestError, OverloadedError, FailureError, web.HTTPException)
        outcome = "refused" if isinstance(error, refusals) else "failed"
        return f"{outcome}: {str(error)[:200]!r}"
