"""What ops need beside their tensors: scratch memory, and what they derive once a step. Knows no op and no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch

Derived = TypeVar("Derived")

DEFAULT_SCRATCH_BYTES = 64 * 2**20
ALIGNMENT = 64


class Workspace:
    """Ops run one after the other, so all of them share one scratch buffer; none finds in it what another left.

    `native_dtypes` are the dtypes that the device multiplies in at full speed. The reference ops work in tiles that
    fit the scratch buffer, whatever the step's sizes.
    """

    def __init__(
        self,
        device: torch.device,
        native_dtypes: frozenset[torch.dtype] = frozenset({torch.float32}),
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    ) -> None:
        self.native_dtypes = native_dtypes
        self.scratch_bytes = scratch_bytes
        self._buffer = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        self._derived: dict[Hashable, Any] = {}

    def scratch(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """Uninitialised tensors side by side in the buffer, which grows if it must. Valid until the next call."""
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if end > self._buffer.numel():
            self._buffer = torch.empty(end, dtype=torch.uint8, device=self._buffer.device)
        flat = self._buffer.view(dtype)
        return [
            flat[offset // dtype.itemsize : offset // dtype.itemsize + math.prod(shape)].view(*shape)
            for offset, shape in zip(offsets, shapes)
        ]

    def begin_step(self) -> None:
        """Forgets what was derived: the step's tensors hold other numbers now."""
        self._derived.clear()

    def once_a_step(self, key: Hashable, derive: Callable[[], Derived]) -> Derived:
        """What `derive` gives, computed once until the next `begin_step`."""
        if key not in self._derived:
            self._derived[key] = derive()
        return cast(Derived, self._derived[key])
