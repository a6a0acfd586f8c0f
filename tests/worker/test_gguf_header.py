"""Parsing GGUF headers: every metadata type, and files that are broken in every place."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.helpers.gguf_files import write
from vllm_lite.errors import StartupError
from vllm_lite.worker.gguf_header import open_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a key of every type and two tensors."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -6)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -7)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -8)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "é 你 \0")
    writer.add_array("texts", ["a", "é", ""])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    write(writer)
    return path


def test_every_type_of_metadata_is_read(path: Path) -> None:
    metadata = open_gguf(path).metadata

    assert metadata.pop("integers").tolist() == [1, -2, 3]
    assert metadata.pop("floats").tolist() == [0.5, 1.5]
    assert metadata == {
        "general.architecture": "llama", "u8": 255, "i8": -5, "u16": 65535, "i16": -6, "u32": 2**32 - 1, "i32": -7,
        "u64": 2**64 - 1, "i64": -8, "f32": 0.5, "f64": 0.1, "yes": True, "no": False, "text": "é 你 \0",
        "texts": ["a", "é", ""],
    }  # fmt: skip
    assert {key: type(metadata[key]) for key in ("u8", "f32", "yes", "text")} == {
        "u8": int, "f32": float, "yes": bool, "text": str,
    }  # fmt: skip


def test_tensors_are_found_where_the_gguf_package_finds_them(path: Path) -> None:
    expected = {
        tensor.name: (tensor.shape[::-1].tolist(), tensor.data_offset) for tensor in gguf.GGUFReader(path).tensors
    }

    file = open_gguf(path)
    assert {info.name: (list(info.shape), info.offset) for info in file.tensors} == expected
    assert file.tensors[0].shape == (3, 4)


def test_the_file_is_never_changed(path: Path) -> None:
    before = path.read_bytes()
    file = open_gguf(path)
    file.data[file.tensors[0].offset] = 99

    assert path.read_bytes() == before


def test_a_file_cut_off_anywhere_in_its_header_is_refused(path: Path) -> None:
    content = path.read_bytes()
    header_size = open_gguf(path).tensors[0].offset - 32
    for size in range(header_size):
        path.write_bytes(content[:size])
        with pytest.raises(StartupError, match=r"model\.gguf"):
            open_gguf(path)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_changed_at_random_never_raise_anything_else(path: Path, seed: int) -> None:
    content = path.read_bytes()
    header_size = open_gguf(path).tensors[0].offset
    random = np.random.default_rng(seed)
    for _ in range(150):
        broken = bytearray(content)
        for position in random.integers(0, header_size, size=3):
            broken[position] = random.integers(0, 256)
        path.write_bytes(broken)
        try:
            open_gguf(path)
        except StartupError as error:
            assert "model.gguf" in str(error)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(100), "it is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "only 2 and 3 in little-endian order"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "it is cut off"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "it is cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "it is cut off"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**62), "it is cut off"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62), "it is cut off"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "metadata of type 77 is not known"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "metadata of type 9 is not known"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "tensor 't' has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 0, 2**40), "tensor t lies beyond its end"),
        (b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 3), "alignment 3 is not a multiple"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(StartupError, match=named):
        open_gguf(path)
