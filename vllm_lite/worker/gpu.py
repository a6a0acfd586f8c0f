"""The GPU beside what is computed on it: whether there is one that the kernels run on, its memory. Knows no model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_lite.errors import StartupError
from vllm_lite.kernels.cuda import Compiler, CudaKernels, cupy_compiler
from vllm_lite.ops.cuda_kernels import kernels_for
from vllm_lite.worker.cuda_graphs import Replay
from vllm_lite.worker.kv_cache import GpuMemory

logger = logging.getLogger(__name__)

GPU_FAULT = re.compile(
    "CUDA error: (an illegal|misaligned address|device-side assert|unspecified launch|uncorrectable|hardware stack)"
)
"""What errors say that are a kernel's or the GPU's own, whatever is computed at that moment."""


class Gpu:
    """A GPU that the kernels run on; tests put a CPU with emulated kernels in its place."""

    def __init__(self, device: torch.device, compiler: Compiler) -> None:
        self.device = device
        """With an index."""
        self.compiler = compiler
        self._graph_pool: Any = None

    @property
    def name(self) -> str:
        """What its maker calls it."""
        return torch.cuda.get_device_name(self.device)

    def make_current(self) -> None:
        """For this thread: what launches kernels must have called this."""
        torch.cuda.set_device(self.device)

    def compile_for(self, dtype: torch.dtype, head_dim: int) -> CudaKernels:
        """All kernels that a model may launch. Raises StartupError where there is none, or one does not compile."""
        self.make_current()
        return CudaKernels(kernels_for(dtype, head_dim), self.device, self.compiler)

    def capture(self, function: Callable[[], None]) -> Replay:
        """As `Capture`, on the current device; all graphs share their memory, so only one runs at a time.

        Raises StartupError where something cannot be captured; a lack of memory and a fault of the GPU stay what they
        are.
        """
        try:
            function()
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graph_pool):
                function()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or GPU_FAULT.search(str(error)):
                raise
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"a decode cannot be captured in a CUDA graph ({reason}): use --enforce-eager"
            ) from error
        self._graph_pool = graph.pool()
        return graph.replay

    def memory_during(self, work: Callable[[], object]) -> GpuMemory:
        """Does the work; tells what this process took at most meanwhile, and what the GPU has afterwards."""
        self.make_current()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return GpuMemory(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(self.device),
            peak=torch.cuda.max_memory_reserved(self.device),
        )


def find_gpu(wanted: Literal["auto", "cpu", "cuda"]) -> Gpu | None:
    """What `--device` asks for; None is the CPU.

    Raises StartupError where a GPU is demanded that the kernels cannot run on; under auto that is a line in the log.
    """
    if wanted == "cpu" or (wanted == "auto" and not gpu_is_there()):
        return None
    try:
        return _usable_gpu()
    except StartupError as error:
        if wanted == "cuda":
            raise StartupError(f"--device cuda: {error}") from error
        logger.warning("the GPU is not used: %s", error)
        return None


def gpu_is_there(dev: Path = Path("/dev")) -> bool:
    """Whether the machine has a GPU of NVIDIA's, be it one that this torch or this driver cannot use."""
    return torch.cuda.device_count() > 0 or any(dev.glob("nvidia[0-9]*"))


def _usable_gpu() -> Gpu:
    """The current one, which is the first that CUDA_VISIBLE_DEVICES leaves unless the caller has chosen another."""
    try:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.device_count() else 0)
        return Gpu(device, cupy_compiler(device))
    except StartupError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise StartupError(f"the GPU cannot be used ({reason}): repair that, or use --device cpu") from error
