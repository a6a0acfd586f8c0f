"""What the machine can do at most, as far as plain torch shows it: reading memory, and multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

NUM_TRIES = 5


@dataclass(frozen=True)
class Ceilings:
    """Rates with as many threads as torch was told to use: the best of a few tries, for nothing speeds a machine up."""

    read_bytes_per_s: float
    """Of a sum over a buffer far larger than every cache. A kernel whose data lie in a cache can be faster."""
    flops_per_s: dict[str, float]
    """Of a product of square matrices: in float32, and in the run's dtype where the chip has instructions for it."""

    @property
    def best_flops_per_s(self) -> float:
        """The largest."""
        return max(self.flops_per_s.values())

    def bound(self, num_bytes: int, flops: int) -> tuple[float, str]:
        """The least seconds that moving and computing so much take, and which of the two it is."""
        memory_s, arithmetic_s = num_bytes / self.read_bytes_per_s, flops / self.best_flops_per_s
        return (memory_s, "memory") if memory_s >= arithmetic_s else (arithmetic_s, "arithmetic")


def measure_ceilings(dtypes: Iterable[torch.dtype], buffer_bytes: int, matrix_size: int) -> Ceilings:
    """Takes a few seconds with a buffer of 1 GiB and matrices of 2,048 rows, if the chip multiplies in all `dtypes`."""
    buffer = torch.ones(buffer_bytes // 4)
    flops = 2 * matrix_size**3
    rates = {}
    for dtype in dtypes:
        matrix = torch.ones(matrix_size, matrix_size, dtype=dtype)
        out = torch.empty_like(matrix)
        rates[str(dtype).removeprefix("torch.")] = flops / _best_s(partial(torch.mm, matrix, matrix, out=out))
    return Ceilings(buffer_bytes / _best_s(buffer.sum), rates)


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_TRIES):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return min(times)
