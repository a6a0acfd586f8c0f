"""A GPU that is none: its memory is this machine's, its kernels are emulated, how much memory it has is made up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.cuda.emulator import STREAM, EmulatorCompileError, EmulatorKernel, EmulatorModule
from tests.helpers.recorded_graph import RecordedGraph
from vllm_lite.kernels.cuda import Compiler
from vllm_lite.worker.cuda_graphs import Replay
from vllm_lite.worker.gpu import Gpu
from vllm_lite.worker.kv_cache import GpuMemory

GIB = 2**30
IDLE = GpuMemory(total=GIB, free=GIB, reserved=0, peak=0)


class EmulatedGpu(Gpu):
    """Records the threads that made it current; its graphs are recordings."""

    def __init__(self, memory: GpuMemory = IDLE) -> None:
        def new_module(**arguments: Any) -> _Module:
            self.num_modules += 1
            return _Module(self, **arguments)

        super().__init__(torch.device("cpu"), Compiler(new_module, EmulatorCompileError, lambda: STREAM.ptr, "g++ 12"))
        self.memory = memory
        self.threads: list[int] = []
        self.num_measurements = 0
        self.num_modules = 0
        self.graphs: list[RecordedGraph] = []
        self.recording: RecordedGraph | None = None

    @property
    def name(self) -> str:
        return "an emulated GPU"

    def make_current(self) -> None:
        self.threads.append(threading.get_ident())

    def memory_during(self, work: Callable[[], object]) -> GpuMemory:
        self.num_measurements += 1
        work()
        return self.memory

    def capture(self, function: Callable[[], None]) -> Replay:
        function()
        graph = self.recording = RecordedGraph()
        with graph:
            function()
        self.recording = None
        self.graphs.append(graph)
        return graph.replay


class _Module(EmulatorModule):
    """Tells the GPU of every launch while that records."""

    def __init__(self, gpu: EmulatedGpu, **arguments: Any) -> None:
        super().__init__(**arguments, is_checked=False)
        self.gpu = gpu

    def get_function(self, name: str) -> EmulatorKernel:
        return _Kernel(super().get_function(name), self.gpu)


class _Kernel(EmulatorKernel):
    def __init__(self, kernel: EmulatorKernel, gpu: EmulatedGpu) -> None:
        vars(self).update(vars(kernel))
        self.gpu = gpu

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        launch = partial(super().__call__, *arguments, **keywords)
        if self.gpu.recording is not None:
            self.gpu.recording.add(launch)
        launch()
