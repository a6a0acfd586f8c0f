"""The real server and the real engine, which writes to its log when each step began and ended.

Run as a module with the real command line. It can be held up as a fault of its own would hold it up: SIGUSR1 stops its
event loop for `HELD_UP_S`, SIGUSR2 the whole interpreter, whose lock nobody gets meanwhile; other native code goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from vllm_lite.build import BuiltEngine, build_parts
from vllm_lite.config import EngineConfig
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import Executor, LLMEngine
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.entrypoints.launch import main
from vllm_lite.entrypoints.native.routes import NATIVE

HELD_UP_S = 0.6
LOG_MARK = "step: "


class Moment(NamedTuple):
    """A time that all processes of the machine share, with how long an event loop had waited for a core until then.

    Both in seconds. Moments compare by their time.
    """

    time_s: float
    waited_s: float

    @classmethod
    def now(cls, pid: int) -> Moment:
        """`pid` is the server's: its first thread runs the event loop."""
        return cls(time.monotonic(), _waited_s(f"/proc/{pid}"))

    def since(self, earlier: Moment) -> float:
        """Seconds of the loop's own: without what other processes made it wait for a core."""
        return self.time_s - earlier.time_s - (self.waited_s - earlier.waited_s)


class Step(NamedTuple):
    """A step that has been computed."""

    began: Moment
    ended: Moment
    busy_s: float
    """How long its thread ran or waited for a core. The rest it waited for the server itself: for the interpreter."""

    def computed_s(self, since: Moment) -> float:
        """Seconds of computing after some moment, at most."""
        return min(self.busy_s, self.ended.since(max(self.began, since)))


class TimedExecutor:
    """Computes steps as another executor does, and writes a line for each."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def execute(self, step: StepInput) -> StepOutput:
        began, busy_s = Moment.now(os.getpid()), _busy_s()
        output = self._executor.execute(step)
        timed = Step(began, Moment.now(os.getpid()), _busy_s() - busy_s)
        sys.stderr.write(f"{LOG_MARK}{json.dumps(timed)}\n")
        return output


def steps_in(log: str) -> list[Step]:
    """Of a server's log."""
    steps = [json.loads(line.removeprefix(LOG_MARK)) for line in log.splitlines() if line.startswith(LOG_MARK)]
    return [Step(Moment(*began), Moment(*ended), busy_s) for began, ended, busy_s in steps]


def _busy_s() -> float:
    """Of this thread."""
    return time.thread_time() + _waited_s("/proc/thread-self")


def _waited_s(thread: str) -> float:
    return int(Path(thread, "schedstat").read_text().split()[1]) / 1e9


def _hold_up(number: int, _: object) -> None:
    if number == signal.SIGUSR1:
        time.sleep(HELD_UP_S)
    else:
        ctypes.PyDLL(None).usleep(round(HELD_UP_S * 1e6))  # a PyDLL keeps the interpreter's lock


def build(config: EngineConfig) -> BuiltEngine:
    parts = build_parts(config)
    engine = AsyncLLMEngine(LLMEngine(parts.settings, parts.tokenizer), TimedExecutor(parts.executor))
    return BuiltEngine(engine, "timed", parts.tokenizer, parts.settings.max_model_len, parts.chat_template)


if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _hold_up)
    sys.exit(main(sys.argv[1:], build, NATIVE))
