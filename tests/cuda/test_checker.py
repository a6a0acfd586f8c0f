"""The checker sees planted bugs, and the emulated tensor-core instructions multiply."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cuda.emulator import (
    STREAM,
    Bytes,
    EmulatorError,
    EmulatorKernel,
    EmulatorModule,
    Order,
    buffers_of,
    missing_requirement,
)
from vllm_lite.kernels.cuda import read_source, source_folder

MISSING = missing_requirement()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# Name, blocks, threads, bytes of shared memory, and what the checker says of the bug.
BUGS = [
    ("missing_barrier", 1, 64, 256, "uninitialised|race: read after a write of shared memory"),
    ("missing_warp_barrier", 1, 32, 128, "uninitialised|race: read after a write of shared memory"),
    ("warp_barrier_for_a_block", 1, 64, 256, "uninitialised|race: read after a write of shared memory"),
    ("missing_copy_wait", 1, 16, 256, "while an asynchronous copy to it has not been waited for"),
    ("missing_warp_barrier_after_copy", 1, 16, 256, "race|uninitialised|asynchronous copy"),
    ("refill_of_a_slot_in_use", 1, 16, 256, "race: .* of shared memory"),
    ("divergent_barrier", 1, 64, 0, r"divergent barrier: .* at line \d+ and at line \d+"),
    ("barrier_in_half_of_a_block", 1, 64, 0, "32 threads of the block have ended"),
    ("deadlock", 1, 64, 0, r"deadlock: .*__syncthreads at line \d+, __syncwarp at line \d+"),
    ("shuffle_without_half_of_the_lanes", 1, 32, 0, r"deadlock: .*__shfl_xor_sync at line \d+, and 16 have ended"),
    ("write_to_an_input", 1, 32, 0, r"write to read-only in\[\d+\]"),
    ("misaligned_access", 1, 1, 0, "misaligned read of 16 bytes"),
    ("uninitialised_shared", 1, 32, 128, r"read of uninitialised shared memory\[124\]"),
    ("shared_overrun", 1, 64, 256, r"out of bounds at shared memory\[256\], which has 256 bytes"),
    ("blocks_write_the_same", 2, 32, 0, "race: write after a write of out.* of another block"),
]


def function(name: str, folder: Path, *, is_checked: bool = True) -> EmulatorKernel:
    """A kernel of planted_bugs.cu, in a module with all of them."""
    source = Path(__file__).with_name("planted_bugs.cu")
    for path in (source, *source_folder().glob("*.cuh")):
        (folder / path.name).write_text(path.read_text())
    names = [*(bug[0] for bug in BUGS), "page_table_overrun"]
    expressions = [f"{bug}<{has_bug}>" for bug in names for has_bug in ("false", "true")]
    expressions += ["matrix_product<half>", "matrix_product<bf16>", "transposed"]
    code = read_source(source.name, folder)
    return EmulatorModule(code=code, name_expressions=expressions, is_checked=is_checked).get_function(name)


def launch(
    kernel: EmulatorKernel, num_blocks: int, num_threads: int, shared_bytes: int, *arguments: torch.Tensor | np.generic
) -> None:
    kernel.module.watch(buffers_of(kernel, arguments))
    values = [np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    kernel((num_blocks,), (num_threads,), values, shared_mem=shared_bytes, stream=STREAM)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(
    ("name", "num_blocks", "num_threads", "shared_bytes", "message"), BUGS, ids=[bug[0] for bug in BUGS]
)
def test_planted_bug_is_caught(
    tmp_path: Path, name: str, num_blocks: int, num_threads: int, shared_bytes: int, message: str, order: Order
) -> None:
    elements, out = torch.randn(64), torch.zeros(64)
    for has_bug in ("false", "true"):
        kernel = function(f"{name}<{has_bug}>", tmp_path)
        kernel.module.set_order(order)
        run = partial(launch, kernel, num_blocks, num_threads, shared_bytes, elements, out)
        if has_bug == "false":
            run()
        else:
            with pytest.raises(EmulatorError, match=message):
                run()


def test_page_table_overrun_is_caught(tmp_path: Path) -> None:
    pages, cache, out = torch.tensor([2, 0, 3], dtype=torch.int32), torch.randn(4, 8), torch.zeros(32)
    launch(function("page_table_overrun<false>", tmp_path), 1, 32, 0, pages, cache, out)
    assert torch.allclose(out[:8], cache[[2, 0, 3]].sum(dim=0))
    with pytest.raises(EmulatorError, match=r"read of 4 bytes out of bounds at pages\[12\], which has 12 bytes"):
        launch(function("page_table_overrun<true>", tmp_path), 1, 32, 0, pages, cache, out)
    pages[1] = 4
    with pytest.raises(EmulatorError, match=r"read of 4 bytes out of bounds at cache\[128\], which has 128 bytes"):
        launch(function("page_table_overrun<false>", tmp_path), 1, 32, 0, pages, cache, out)


def test_a_kernel_without_the_checker_shows_missing_waits_in_its_numbers(tmp_path: Path) -> None:
    elements, out = torch.randn(64), torch.zeros(16)
    launch(function("missing_copy_wait<false>", tmp_path, is_checked=False), 1, 16, 256, elements, out)
    assert torch.equal(out, elements.flip(0)[:16])
    launch(function("missing_copy_wait<true>", tmp_path, is_checked=False), 1, 16, 256, elements, out)
    assert out.isnan().any()


@pytest.mark.parametrize(("stride", "num_conflicts"), [(16, 8), (24, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_product(tmp_path: Path, dtype: torch.dtype, stride: int, num_conflicts: int) -> None:
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype), torch.empty(16, 8)
    kernel = function(f"matrix_product<{'half' if dtype == torch.float16 else 'bf16'}>", tmp_path)
    launch(kernel, 1, 32, 2 * 16 * stride * 2, a, b, c, np.int32(stride))
    torch.testing.assert_close(c, a.float() @ b.float().T)
    assert kernel.module.bank_conflicts() == num_conflicts
    assert kernel.module.bytes("a") == Bytes(read=16 * 16 * 2, written=0)


def test_transposed_load(tmp_path: Path) -> None:
    elements = torch.arange(256, dtype=torch.float16).view(16, 16)
    out = torch.empty_like(elements)
    launch(function("transposed", tmp_path), 1, 32, 512, elements, out)
    assert torch.equal(out, elements.T)
