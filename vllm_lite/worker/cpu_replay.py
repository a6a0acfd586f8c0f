"""A step as a list of CPU kernel calls, captured once and replayed. Knows no model and no request.

Kernels read a step's sizes when they run, so one list serves decodes, prompt chunks and mixed steps of every size.
"""

from __future__ import annotations

from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cpu import CapturedCalls, CpuKernels
from vllm_lite.worker.compute import Compute, Head

NO_STEP = StepShape(num_tokens=0, num_seqs=0, num_decodes=0, max_query_len=0, max_context_len=0)


class CpuReplay:
    """A `Compute`: what another one calls, without the Python that calls it."""

    def __init__(self, compute: Compute, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._calls: dict[Head, CapturedCalls] = {}
        for head in Head:
            with kernels.capture() as calls:
                compute(NO_STEP, head)
            self._calls[head] = calls.finished()

    def __call__(self, shape: StepShape, head: Head) -> None:
        """As `Compute`."""
        self._kernels.replay(self._calls[head], shape)
