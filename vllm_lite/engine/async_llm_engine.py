"""Runs the engine for many asyncio tasks at once. Knows no HTTP and nothing of what the executor does.

One task steps the engine and owns its queues and blocks together with the event loop; only `executor.execute` runs on
a thread of its own, and tokenising on a small pool, but for a few short prompts. So nothing needs a lock.

A step that raises fails the requests that took part in it, and the engine goes on, since one poisonous request must
not stop the others. It is dead once the same error has hit three steps in a row whose prompts are all different: then
the fault is not a request's. An error outside of the executor is our own bug and ends the engine at once. So does
whoever finds that a step does not end (`step_time_s`, `declare_dead`); nothing here waits for that step.

What a caller is told of such failures has nothing of their insides: those are in the log, and in the error's cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from vllm_lite.engine.llm_engine import MAX_QUICK_SIZE, Executor, LLMEngine
from vllm_lite.engine.sequence import Request
from vllm_lite.engine.statistics import EngineStats
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.errors import EngineDeadError, RequestError, RequestFailedError
from vllm_lite.outputs import CompletionDelta, RequestDelta, RequestTally
from vllm_lite.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

STATS_INTERVAL_S = 10.0
MAX_FAILURES_IN_A_ROW = 3
NUM_TOKENISING_THREADS = 2
MAX_SIZE_IN_A_TURN = 4 * MAX_QUICK_SIZE
"""Of all that the event loop tokenises before others on it have their turn: requests come hundreds at a time."""
NUM_DELTAS_AT_ONCE = 32
"""For a caller that waits for the end. To take them in one go holds up nobody for long."""
LOG_SAYS_WHY = "the log says why."


class Stream:
    """What the reader of one request has not read yet: at most a delta a token. Nothing comes after its end.

    A reader that has read everything is woken by the next delta, or by that which makes `num_at_once`, or by the end.
    """

    def __init__(self, num_at_once: int = 1) -> None:
        self.request: Request | None = None
        """None until the prompt has been tokenised."""
        self.has_ended = False
        self._num_at_once = num_at_once
        self._items: deque[RequestDelta | Exception] = deque()
        self._has_items: asyncio.Future[None] | None = None
        """What the reader waits for, where it has read everything."""

    def put(self, item: RequestDelta | Exception) -> None:
        """Takes a delta, or the exception that the reader shall get."""
        if not self.has_ended:
            self.has_ended = isinstance(item, Exception) or item.finished
            self._items.append(item)
            is_due = self.has_ended or len(self._items) >= self._num_at_once
            if is_due and self._has_items is not None and not self._has_items.done():
                self._has_items.set_result(None)

    async def get(self) -> RequestDelta:
        """The next delta, in the order of `put`. There is one reader."""
        if not self._items:  # an asyncio.Queue does the same at three times the cost, for every token
            self._has_items = asyncio.get_running_loop().create_future()
            await self._has_items
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item


class FailureStreak:
    """Counts steps in a row that failed with the same error although no two of them had a prompt in common.

    Repeating one poisonous request does not make it longer, so no caller can kill the engine by insisting.
    """

    def __init__(self) -> None:
        self.length = 0
        self._error: tuple[type[BaseException], str] | None = None
        self._prompts: set[int] = set()

    def end(self) -> None:
        """A step succeeded."""
        self.length = 0
        self._error = None
        self._prompts.clear()

    def add(self, error: BaseException, prompts: set[int]) -> None:
        """A step failed; `prompts` are the hashes of its prompts, none where every caller has left."""
        key = (type(error), str(error))
        if key != self._error:
            self.end()
            self._error = key
        if prompts and self._prompts.isdisjoint(prompts):
            self.length += 1
        self._prompts |= prompts


class StatsLog:
    """One line of statistics every 10 seconds, as long as steps are computed."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._last_step_time_s = -STATS_INTERVAL_S
        self._start_time_s = 0.0
        self._start = engine.stats()

    def log_if_due(self, now_s: float) -> None:
        """To be called after each step with a monotonic time."""
        if now_s - self._last_step_time_s >= STATS_INTERVAL_S:  # the engine was idle: its rates begin now
            self._start_time_s, self._start = now_s, self._engine.stats()
        elif now_s - self._start_time_s >= STATS_INTERVAL_S:
            stats, elapsed_s = self._engine.stats(), now_s - self._start_time_s
            logger.info(
                "Running %d, waiting %d, prompt %.1f tokens/s, generation %.1f tokens/s, KV cache %.1f %% used, "
                "prefix hits %.1f %%, preemptions %d.",
                stats.num_running,
                stats.num_waiting,
                (stats.num_prompt_tokens - self._start.num_prompt_tokens) / elapsed_s,
                (stats.num_generated_tokens - self._start.num_generated_tokens) / elapsed_s,
                100 * stats.kv_cache_usage,
                100 * stats.num_prefix_hit_tokens / max(stats.num_prefix_queried_tokens, 1),
                stats.num_preemptions,
            )
            self._start_time_s, self._start = now_s, stats
        self._last_step_time_s = now_s


class AsyncLLMEngine:
    """An engine whose requests are async generators. All methods belong to the thread of the event loop."""

    def __init__(self, engine: LLMEngine, executor: Executor, *, log_stats: bool = True) -> None:
        self._engine = engine
        self._executor = executor
        self._stats_log = StatsLog(engine) if log_stats else None
        self._failure_streak = FailureStreak()
        self._compute_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="execute")
        self._tokenise_pool = ThreadPoolExecutor(NUM_TOKENISING_THREADS, thread_name_prefix="tokenise")
        self._size_in_this_turn = 0
        """Of what the event loop has tokenised."""
        self._streams: dict[str, Stream] = {}
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self._step: asyncio.Future[StepOutput] | None = None
        """The one that was last handed to the compute thread."""
        self._step_start_s = 0.0
        self._death: str | None = None
        self._death_cause: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._task is not None and not self._task.done() and self._death is None and not self._is_stopping

    @property
    def step_time_s(self) -> float | None:
        """How many seconds the step that is being computed has taken; None where none is, for a dead engine, too."""
        return None if self._step is None or self._step.done() else time.monotonic() - self._step_start_s

    def start(self) -> None:
        """Starts stepping, on the running event loop."""
        assert self._task is None, "an engine starts once"
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine")

    async def stop(self) -> None:
        """Waits for the step that is being computed, then ends. Requests still open get an EngineDeadError.

        Once the engine has been declared dead, the step is not waited for: its thread stays.
        """
        self._is_stopping = True
        self._has_work.set()
        if self._task is not None:
            await asyncio.wait([self._task])  # a dead engine's has been cancelled
        self._compute_pool.shutdown(wait=self.step_time_s is None)
        self._tokenise_pool.shutdown(wait=False)
        self._end_streams("The engine has been stopped.")

    def declare_dead(self, reason: str) -> None:
        """Ends an engine whose step does not end: no request is served any more, open ones get an EngineDeadError.

        They are told the reason.
        """
        self._die(reason, None)
        if self._task is not None:
            self._task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Waits up to `grace_s` seconds for the open requests, then ends the rest with reason "abort"."""
        try:
            await asyncio.wait_for(self._is_idle.wait(), grace_s)
        except asyncio.TimeoutError:
            for request_id in self._streams:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Ends an open request with reason "abort": its reader gets what there is. Harmless where it has ended."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.has_ended:
            unstarted = RequestDelta(request_id, (CompletionDelta(0, "", (), "abort"),), finished=True)
            stream.put(self._engine.abort(request_id) or unstarted)

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
        return self._engine.stats()

    def prompt_token_ids(self, request_id: str) -> Sequence[int]:
        """The prompt's ids while `generate` is open; empty before they are known."""
        stream = self._streams.get(request_id)
        return () if stream is None or stream.request is None else stream.request.prompt_token_ids

    def admission_time_s(self, request_id: str) -> float | None:
        """When the request first left the queue, in monotonic seconds, while `generate` is open; None before that."""
        stream = self._streams.get(request_id)
        return None if stream is None or stream.request is None else stream.request.admission_time_s

    async def generate(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        add_special_tokens: bool = True,
        prepared: Request | None = None,
        is_whole: bool = False,
        on_end: Callable[[RequestTally], None] | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Yields a delta for each step that generated something. Closing or cancelling it aborts the request.

        Without `prompt_token_ids` the prompt is tokenised, with what the tokenizer adds by itself or without it.
        `prepared` is what `LLMEngine.prepare` made of the other arguments, for callers that check many prompts first:
        these requests are queued in the order in which they are asked for. A caller that wants the whole alone gets its
        deltas late, many at a time: to be woken is most of what a delta costs. `on_end` gets what was counted of the
        request, however it ends, before this generator does; it is not called for one that was not queued.

        Raises RequestError for a caller's mistake (before the first delta), RequestFailedError where this request
        failed, EngineDeadError where no request can be served.
        """
        arrival_time_s = time.monotonic()
        self._check_alive()
        assert request_id not in self._streams, "every request has an id of its own"
        stream = self._streams[request_id] = Stream(NUM_DELTAS_AT_ONCE if is_whole else 1)
        self._is_idle.clear()
        try:
            request = prepared
            if request is None:
                prepare = partial(
                    self._engine.prepare,
                    request_id,
                    prompt,
                    prompt_token_ids,
                    params,
                    add_special_tokens=add_special_tokens,
                )
                size = self._engine.quick_size(prompt, prompt_token_ids, params)
                request = await self._prepare(prepare, request_id, is_quick=self._takes_a_turn(size))
            if not stream.has_ended:
                stream.request = request
                self._engine.enqueue(request, arrival_time_s)
                self._has_work.set()
            finished = False
            while not finished:
                delta = await stream.get()
                finished = delta.finished
                yield delta
        finally:
            del self._streams[request_id]
            if self._death is None:  # a dead engine's queues cannot be trusted
                self._engine.abort(request_id)
            if on_end is not None and stream.request is not None and stream.request.outcome is not None:
                on_end(stream.request.tally)
            if not self._streams:
                self._is_idle.set()

    async def _run(self) -> None:
        """Steps the engine while there is work. The one place that catches everything: nothing may die in silence."""
        try:
            while not self._is_stopping:
                step = self._engine.begin_step()
                if step is not None:
                    await self._compute(step)
                else:
                    self._has_work.clear()
                    await self._has_work.wait()
        except Exception as error:
            logger.exception("The engine is dead.")
            self._die(f"The engine is dead; {LOG_SAYS_WHY}", error)

    def _takes_a_turn(self, quick_size: int | None) -> bool:
        """Whether the event loop tokenises a prompt itself: if it is short and what others have left of this turn."""
        if quick_size is None or self._size_in_this_turn + quick_size > MAX_SIZE_IN_A_TURN:
            return False
        if not self._size_in_this_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._size_in_this_turn += quick_size
        return True

    def _begin_turn(self) -> None:
        self._size_in_this_turn = 0

    async def _prepare(self, prepare: Callable[[], Request], request_id: str, *, is_quick: bool) -> Request:
        """Tokenises, on the pool where that takes long.

        Raises RequestError, and RequestFailedError for what is not the caller's mistake.
        """
        try:
            return _call(prepare) if is_quick else await self._on_pool(prepare)
        except RequestError:
            raise
        except Exception as error:
            logger.error("Request %s failed: its prompt could not be tokenised.", request_id, exc_info=error)
            raise RequestFailedError(f"The prompt could not be tokenised; {LOG_SAYS_WHY}") from error

    async def _on_pool(self, prepare: Callable[[], Request]) -> Request:
        preparing = asyncio.get_running_loop().run_in_executor(self._tokenise_pool, _call, prepare)
        try:
            await asyncio.wait([preparing])  # does not raise what it raised
        finally:
            preparing.cancel()  # where its caller has left; without effect once it has begun
        return preparing.result()

    async def _compute(self, step: StepInput) -> None:
        """Has a step executed and hands out what came of it."""
        self._step_start_s = time.monotonic()
        future = asyncio.get_running_loop().run_in_executor(self._compute_pool, _call, self._executor.execute, step)
        self._step = future
        await asyncio.wait([future])  # does not raise what the step raised
        error = future.exception()
        if error is not None:
            self._fail_step(error)
            return
        self._failure_streak.end()
        for delta in self._engine.finish_step(future.result()):
            self._put(delta.request_id, delta)
        for request_id, failure in self._engine.take_failures().items():
            logger.error("Request %s failed: %s", request_id, failure, exc_info=failure.__cause__)
            self._put(request_id, failure)
        if self._stats_log is not None:
            self._stats_log.log_if_due(time.monotonic())

    def _fail_step(self, error: BaseException) -> None:
        request_ids = self._engine.fail_step()
        logger.error("A step failed, and with it the requests %s.", ", ".join(request_ids), exc_info=error)
        prompts = {hash(tuple(self.prompt_token_ids(request_id))) for request_id in request_ids}
        for request_id in request_ids:
            failure = RequestFailedError(f"The step that computed this request failed; {LOG_SAYS_WHY}")
            failure.__cause__ = error
            self._put(request_id, failure)
        self._failure_streak.add(error, prompts)
        if self._failure_streak.length >= MAX_FAILURES_IN_A_ROW:
            raise EngineDeadError(f"{MAX_FAILURES_IN_A_ROW} steps in a row failed with {error!r}") from error

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError(self._death or "The engine does not run.") from self._death_cause

    def _put(self, request_id: str, item: RequestDelta | Exception) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:  # its reader left during the step
            stream.put(item)

    def _die(self, reason: str, cause: BaseException | None) -> None:
        if self._death is None:
            self._death, self._death_cause = reason, cause
            self._engine.give_up()
            self._end_streams(reason)

    def _end_streams(self, message: str) -> None:
        for stream in self._streams.values():
            error = EngineDeadError(message)
            error.__cause__ = self._death_cause
            stream.put(error)


def _call(function: Callable[..., Value], *arguments: Any) -> Value:
    """Where it raises what no request could be failed with, raises a RuntimeError.

    An asyncio future cannot hold a StopIteration: who waits for it would wait for ever. And a library in Rust that
    panics raises what is no Exception.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(f"it raised {error!r}") from error
