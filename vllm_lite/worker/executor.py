"""Runs steps in this process. Other executors would send them to ranks; the engine sees no difference."""

from __future__ import annotations

from collections.abc import Callable

from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.worker.model_runner import ModelRunner


class LocalExecutor:
    """One model runner, called by one thread at a time.

    `make_current` makes the runner's device the current one of the calling thread, where it must be.
    """

    def __init__(self, runner: ModelRunner, make_current: Callable[[], None] | None = None) -> None:
        self._runner = runner
        self._make_current = make_current

    def execute(self, step: StepInput) -> StepOutput:
        """Computes the step; whatever it raises is the failure of this step."""
        if self._make_current is not None:
            self._make_current()  # at every step, since it costs nothing and the thread may be a new one
        return self._runner.run(step)
