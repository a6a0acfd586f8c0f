"""An engine on an event loop on a thread of its own, for callers on other threads. Knows no prompt.

Signals come to the main thread alone, so Ctrl-C never lands in the middle of a step, and a caller whose own event loop
is running can wait without one that waits for itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.errors import EngineDeadError

Value = TypeVar("Value")
Started = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
"""The loop of the thread, and what tells it to stop; or why there is none."""


class EngineThread:
    """Runs coroutines beside an engine. All methods are thread-safe.

    Raises what keeps the thread, its loop or the engine from starting.
    """

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine: AsyncLLMEngine | None = engine
        """None once it has been told to stop, so that the model's memory is free."""
        self._lock = threading.Lock()
        started: Started = Future()
        # A daemon, for the interpreter waits for all others before it tells anybody to stop.
        self._thread = threading.Thread(target=_run, args=(engine, started), name="engine", daemon=True)
        self._thread.start()
        self._loop, self._must_stop = started.result()

    def submit(self, call: Callable[[AsyncLLMEngine], Coroutine[Any, Any, Value]]) -> Future[Value]:
        """Starts `call(engine)` on the loop. Cancelling the future cancels it. Raises EngineDeadError after `stop`."""
        with self._lock:  # nothing is handed to a loop that has ended
            if self._engine is None:
                raise EngineDeadError("This LLM has been closed; make a new one.")
            return asyncio.run_coroutine_threadsafe(call(self._engine), self._loop)

    def run(self, call: Callable[[AsyncLLMEngine], Coroutine[Any, Any, Value]]) -> Value:
        """What `call(engine)` returns or raises. If this thread is interrupted, at whatever moment, the call ends."""
        outcome: Future[Value] = Future()  # before there is a call that could go on without it
        try:
            self.submit(partial(_settle, call=call, outcome=outcome))
            return outcome.result()
        except BaseException:
            outcome.cancel()  # without effect but where this thread was interrupted
            raise

    def stop(self) -> None:
        """Ends the engine, what runs on it with an EngineDeadError, and the thread. Harmless when repeated."""
        with self._lock:
            if self._engine is None:
                return
            self._engine = None
            self._loop.call_soon_threadsafe(self._must_stop.set)
        if threading.current_thread() is not self._thread:  # as where the last reference was dropped on the loop
            self._thread.join()


async def _settle(
    engine: AsyncLLMEngine, *, call: Callable[[AsyncLLMEngine], Coroutine[Any, Any, Value]], outcome: Future[Value]
) -> None:
    """Runs a call into its outcome. Cancelling that cancels the call, from before its beginning to its end."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(call(engine))

    def leave(settled: Future[Value]) -> None:
        if settled.cancelled():
            loop.call_soon_threadsafe(task.cancel)

    outcome.add_done_callback(leave)
    await asyncio.wait([task])  # does not raise what the call raised
    with suppress(InvalidStateError):  # nobody waits for it any more
        if task.cancelled():
            outcome.cancel()
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())


def _run(engine: AsyncLLMEngine, started: Started) -> None:
    serving = _serve(engine, started)
    try:
        asyncio.run(serving)
    except BaseException as error:
        serving.close()  # has not begun where there is no loop to run it on
        if started.done():
            raise
        started.set_exception(error)  # for whoever waits until the thread is ready


async def _serve(engine: AsyncLLMEngine, started: Started) -> None:
    must_stop = asyncio.Event()
    engine.start()
    started.set_result((asyncio.get_running_loop(), must_stop))
    await must_stop.wait()
    await engine.stop()
    if calls := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(calls)  # each gets its error before the loop ends
