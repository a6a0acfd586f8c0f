"""What ops need beside their tensors: scratch memory, and what they derive once a step. Knows no op and no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar, cast

import torch

from vllm_lite.kernels.cpu import CpuKernels
from vllm_lite.kernels.cuda import CudaKernels

Derived = TypeVar("Derived")

DEFAULT_SCRATCH_BYTES = 64 * 2**20
ALIGNMENT = 64


class Workspace:
    """Ops run one after the other, so all of them share one scratch buffer; none finds in it what another left.

    `native_dtypes` are the dtypes that the device multiplies in at full speed. The reference ops work in tiles that
    fit the scratch buffer, whatever the step's sizes. With `cuda`, the ops that have a kernel launch it; with `cpu`,
    every op of a model calls its kernel; otherwise the reference runs.
    """

    def __init__(
        self,
        device: torch.device,
        native_dtypes: frozenset[torch.dtype] = frozenset({torch.float32}),
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
        cuda: CudaKernels | None = None,
        cpu: CpuKernels | None = None,
    ) -> None:
        self.native_dtypes = native_dtypes
        self.cuda = cuda
        self.cpu = cpu
        self.scratch_bytes = scratch_bytes
        self._buffer = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        self._views: dict[Hashable, list[torch.Tensor]] = {}
        self._derived: dict[Hashable, Any] = {}
        self._kept: dict[Hashable, torch.Tensor] = {}

    def scratch(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """Uninitialised tensors side by side in the buffer, which grows if it must. Valid until the next call."""
        views = self._views.get((dtype, shapes))
        if views is None:
            views = self._views[dtype, shapes] = self._new_views(dtype, shapes)
        return views

    def _new_views(self, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(end // dtype.itemsize)
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if end > self._buffer.numel():
            self._buffer = torch.empty(end, dtype=torch.uint8, device=self._buffer.device)
            self._views.clear()
        flat = self._buffer.view(dtype)
        return [flat[offset : offset + math.prod(shape)].view(shape) for offset, shape in zip(offsets, shapes)]

    def kept(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A tensor of its own that keeps its address, for ops whose calls are captured; the same for the same name."""
        key = (name, dtype, shape)
        if key not in self._kept:
            self._kept[key] = torch.empty(shape, dtype=dtype, device=self._buffer.device)
        return self._kept[key]

    def row_tiles(self, num_rows: int, bytes_per_row: int) -> Iterator[slice]:
        """Cuts rows into as many tiles as it takes for each to fit the scratch buffer."""
        size = max(1, self.scratch_bytes // bytes_per_row)
        for start in range(0, num_rows, size):
            yield slice(start, min(start + size, num_rows))

    def begin_step(self) -> None:
        """Forgets what was derived, for the step's tensors hold other numbers now, and the views of other sizes."""
        self._derived.clear()
        self._views.clear()

    def once_a_step(self, key: Hashable, derive: Callable[[], Derived]) -> Derived:
        """What `derive` gives, computed once until the next `begin_step`."""
        if key not in self._derived:
            self._derived[key] = derive()
        return cast(Derived, self._derived[key])
