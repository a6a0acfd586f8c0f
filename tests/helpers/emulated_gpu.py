"""A GPU that is none: its memory is this machine's, its kernels are emulated, how much memory it has is made up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from tests.cuda.emulator import STREAM, EmulatorCompileError, EmulatorModule
from vllm_lite.kernels.cuda import Compiler
from vllm_lite.worker.gpu import Gpu
from vllm_lite.worker.kv_cache import GpuMemory

GIB = 2**30
IDLE = GpuMemory(total=GIB, free=GIB, reserved=0, peak=0)


class EmulatedGpu(Gpu):
    """Records the threads that made it current."""

    def __init__(self, memory: GpuMemory = IDLE) -> None:
        module_class = partial(EmulatorModule, is_checked=False)
        super().__init__(
            torch.device("cpu"), Compiler(module_class, EmulatorCompileError, lambda: STREAM.ptr, "g++ 12")
        )
        self.memory = memory
        self.threads: list[int] = []
        self.num_measurements = 0

    @property
    def name(self) -> str:
        return "an emulated GPU"

    def make_current(self) -> None:
        self.threads.append(threading.get_ident())

    def memory_during(self, work: Callable[[], object]) -> GpuMemory:
        self.num_measurements += 1
        work()
        return self.memory
