"""Runs steps in this process. Other executors would send them to ranks; the engine sees no difference."""

from __future__ import annotations

from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.worker.model_runner import ModelRunner


class LocalExecutor:
    """One model runner, called by one thread at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, step: StepInput) -> StepOutput:
        """Computes the step; whatever it raises is the failure of this step."""
        return self._runner.run(step)
