"""The checker sees bugs planted in the tensor-core attention kernels, where asynchronous copies run ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda.emulator import EmulatedKernels, EmulatorError, missing_requirement
from tests.ops.tensors import workspace
from tests.ops.test_attention import check, make_batch
from vllm_lite.kernels import cuda
from vllm_lite.ops import cuda_attention

MISSING = missing_requirement()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

NOT_WAITED_FOR = "while an asynchronous copy to it has not been waited for"
# Name, file, what stands there, what is put in its place, and what the checker says.
BUGS = [
    ("decode-missing-wait", "decode_mma.cu", "cp_async_wait<AHEAD - 1>();", "cp_async_wait<AHEAD>();", NOT_WAITED_FOR),
    ("decode-missing-warp-barrier", "decode_mma.cu", "__syncwarp();", "", f"race|uninitialised|{NOT_WAITED_FOR}"),
    ("decode-refill-in-use", "decode_mma.cu", "(stage + AHEAD) % STAGES<D>);", "stage);", f"race|{NOT_WAITED_FOR}"),
    (
        "decode-missing-barrier",
        "decode_mma.cu",
        "__syncthreads();  // no warp needs the rings any more",
        "",
        f"race: .* of shared memory|{NOT_WAITED_FOR}",
    ),
    (
        "decode-divergent-barrier",
        "decode_mma.cu",
        "results.put(rows);\n  __syncthreads();",
        "results.put(rows);\n  if (threadIdx.x < 32)\n    __syncthreads();\n  else\n    __syncthreads();",
        "divergent barrier",
    ),
    (
        "decode-page-table-overrun",
        "decode_mma.cu",
        "position < keys.end ?",
        "position < keys.end + 32 ?",
        "out of bounds at (block_tables|key_cache)",
    ),
    ("prefill-missing-wait", "prefill_mma.cu", "cp_async_wait<0>();", "", NOT_WAITED_FOR),
    ("prefill-missing-barrier", "prefill_mma.cu", "__syncthreads();", "__syncwarp();", f"race|{NOT_WAITED_FOR}"),
    ("prefill-refill-in-use", "prefill_mma.cu", "copy(1 - stage,", "copy(stage,", NOT_WAITED_FOR),
]


@pytest.mark.parametrize(("name", "source", "right", "wrong", "message"), BUGS, ids=[bug[0] for bug in BUGS])
def test_planted_bug_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, right: str, wrong: str, message: str
) -> None:
    for path in cuda.source_folder().glob("*.cu*"):
        (tmp_path / path.name).write_text(path.read_text())
    text = (tmp_path / source).read_text()
    assert text.count(right) == 1
    (tmp_path / source).write_text(text.replace(right, wrong))
    monkeypatch.setattr(cuda, "source_folder", lambda: tmp_path)
    space = workspace(cuda=EmulatedKernels(cuda_attention.kernels(torch.float16, 64)))
    # One partition, for which the warps' rings go round.
    monkeypatch.setattr(cuda_attention, "ENOUGH_BLOCKS", 1)
    work = [(1, 320)] if source == "decode_mma.cu" else [(3, 150)]
    batch = make_batch(work, num_kv_heads=1, head_dim=64, dtype=torch.float16)
    batch.block_tables = batch.block_tables[:1, : -(-batch.shape.max_context_len // 8)]
    with pytest.raises(EmulatorError, match=rf"{source.removesuffix('.cu')}<half, 64>: .*({message})"):
        check(space, batch)
