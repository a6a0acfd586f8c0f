"""Runs steps in this process. Other executors would send them to ranks; the engine sees no difference."""

from __future__ import annotations

from collections.abc import Callable

from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.worker.model_runner import ModelRunner


class LocalExecutor:
    """One model runner, called by one thread at a time.

    `prepare_thread` makes the calling thread one that the device can be used from.
    """

    def __init__(self, runner: ModelRunner, prepare_thread: Callable[[], None] | None = None) -> None:
        self._runner = runner
        self._prepare_thread = prepare_thread

    def execute(self, step: StepInput) -> StepOutput:
        """Computes the step; whatever it raises is the failure of this step."""
        if self._prepare_thread is not None:
            self._prepare_thread()  # at every step, since it costs nothing and the thread may be a new one
        return self._runner.run(step)
