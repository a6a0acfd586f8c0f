"""Parses the header of a GGUF file: metadata and where each tensor lies. Knows no architecture and no tensor type.

The gguf package's reader wraps each of a vocabulary's 100,000 strings in arrays, which takes seconds; this takes a
tenth of one. Every length in the file is checked before it is used.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_lite.errors import StartupError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
"""numpy's names of the metadata types."""


@dataclass(frozen=True)
class GGUFTensorInfo:
    """Where a tensor lies: `shape` in torch's order, the contiguous dimension last; `offset` in bytes, in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """An open file: strings and numbers as plain Python values, arrays of numbers as numpy, of strings as lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[GGUFTensorInfo]
    data: mmap.mmap

    def release(self, offset: int, length: int) -> None:
        """Bytes that have been read no longer count as the process's memory; read again, they come from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, offset + length - start)


def open_gguf(path: Path) -> GGUFFile:
    """Maps the file and parses its header. Raises StartupError where it is no GGUF, cut off or broken."""
    try:
        with path.open("rb") as file:
            # A private mapping: torch wants writable memory, and the file stays as it is.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    return _HeaderReader(path, data).read()


class _HeaderReader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def read(self) -> GGUFFile:
        if self.take(4) != MAGIC:
            raise self.broken("it is not a GGUF file")
        version = self.unpack("<I")
        if version not in SUPPORTED_VERSIONS:
            raise self.broken(f"GGUF version {version} is not supported, only 2 and 3 in little-endian order")
        num_tensors, num_keys = self.unpack("<Q"), self.unpack("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(self.unpack("<I"))
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self.broken(f"general.alignment {alignment!r} is not a multiple of 8")
        start = -(-self.position // alignment) * alignment
        tensors = [GGUFTensorInfo(name, shape, type_id, start + offset) for name, shape, type_id, offset in infos]
        for tensor in tensors:
            if tensor.offset % 8 or tensor.offset > len(self.data):
                raise self.broken(f"it is cut off: tensor {tensor.name} lies beyond its end")
        return GGUFFile(self.path, metadata, tensors, self.data)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self.string(), self.unpack("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self.broken(f"tensor {name!r} has {num_dimensions} dimensions")
        dimensions = tuple(self.unpack("<Q") for _ in range(num_dimensions))
        return name, dimensions[::-1], self.unpack("<I"), self.unpack("<Q")

    def value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self.array()
        return self.numbers(type_id, 1)[0].item()

    def array(self) -> Any:
        type_id, length = self.unpack("<I"), self.unpack("<Q")
        if type_id == STRING:
            self.check_left(length * struct.calcsize("<Q"))
            return [self.string() for _ in range(length)]
        return self.numbers(type_id, length)

    def numbers(self, type_id: int, length: int) -> Any:
        if type_id not in SCALARS:
            raise self.broken(f"metadata of type {type_id} is not known")
        dtype = np.dtype(SCALARS[type_id])
        return np.frombuffer(self.take(length * dtype.itemsize), dtype)

    def string(self) -> str:
        return self.take(self.unpack("<Q")).decode("utf-8", errors="replace")

    def unpack(self, layout: str) -> int:
        number: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return number

    def take(self, length: int) -> bytes:
        self.check_left(length)
        start = self.position
        self.position += length
        return self.data[start : self.position]

    def check_left(self, length: int) -> None:
        if length > len(self.data) - self.position:
            raise self.broken(f"it is cut off: its header goes on after its end at byte {len(self.data)}")

    def broken(self, reason: str) -> StartupError:
        return StartupError(f"{self.path} cannot be loaded: {reason}.")
