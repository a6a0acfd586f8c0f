"""Memory in pages of 2 MiB, as far as the system has them: a processor reads it up to twice as fast.

It looks up where a page lies before it can read ahead in it, and with pages of 4 KiB that is every 64 cache lines.
"""

from __future__ import annotations

import ctypes
import math
import platform

import torch

HUGE_PAGE_BYTES = 2 * 2**20
CHUNK_BYTES = 128 * 2**20
ALIGNMENT = 64
MOST_BYTES = 2**62
"""What torch can count."""
MADV_HUGEPAGE = 14


def prefer_huge_pages(memory: torch.Tensor) -> torch.Tensor:
    """The same tensor, contiguous and in host memory, untouched so far; a request to the system that it may ignore."""
    start = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (memory.data_ptr() + memory.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end > start and platform.system() == "Linux":
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(start, end - start, MADV_HUGEPAGE)
    return memory


class Arena:
    """Gives out tensors side by side: each alone would be too small for pages of that size.

    Memory that nothing has been put into yet is not taken from the system.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, in host memory. Raises MemoryError, or torch's RuntimeError, where there is not enough."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > MOST_BYTES:
            raise MemoryError(f"{num_bytes} bytes are more than any memory has")
        if self._used + num_bytes > len(self._chunk):
            self._chunk = prefer_huge_pages(torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8))
            self._used = 0
        memory = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return memory.view(dtype).view(shape)
