"""The composition root with a GPU, which is emulated: sizes, threads, and every way in which a start may end."""

from __future__ import annotations

import dataclasses
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.emulator import missing_requirement
from tests.helpers.checkpoints import cached_checkpoint, reference_greedy
from tests.helpers.emulated_gpu import GIB, EmulatedGpu
from tests.helpers.engine_fakes import greedy
from vllm_lite import build
from vllm_lite.config import EngineConfig
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.entrypoints.launch import main
from vllm_lite.entrypoints.native.routes import NATIVE
from vllm_lite.errors import StartupError
from vllm_lite.kernels import cuda
from vllm_lite.worker.kv_cache import GpuMemory, bytes_per_block

MISSING = missing_requirement()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

PROMPT = [(17 * i + 5) % 254 + 2 for i in range(21)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    gpu = EmulatedGpu()
    monkeypatch.setattr(build, "find_gpu", lambda wanted: gpu if wanted != "cpu" else None)
    return gpu


def make_parts(**fields: Any) -> build.EngineParts:
    fields = {"model": str(cached_checkpoint()), "num_threads": 1, "dtype": "float32", "max_num_seqs": 4, **fields}
    return build.build_parts(EngineConfig(**fields))


def test_tokens_are_those_of_hugging_face(gpu: EmulatedGpu, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    parts = make_parts(max_num_batched_tokens=16)
    parts.engine.add_request("0", None, PROMPT, greedy(max_tokens=8))
    ids: list[int] = []
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            ids.extend(delta.outputs[0].token_ids)
    assert ids == reference_greedy(cached_checkpoint(), PROMPT, 8)
    assert "LlamaForCausalLM in float32 on an emulated GPU" in caplog.text


def test_the_gpu_is_made_current_in_the_thread_that_computes(gpu: EmulatedGpu) -> None:
    parts = make_parts()
    assert set(gpu.threads) == {threading.get_ident()}
    gpu.threads.clear()
    parts.engine.add_request("0", None, PROMPT, greedy(max_tokens=1))
    step = parts.engine.begin_step()
    assert step is not None

    def execute(step: StepInput) -> tuple[StepOutput, int]:
        return parts.executor.execute(step), threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        _, thread = pool.submit(execute, step).result()
    assert gpu.threads == [thread] != [threading.get_ident()]


def test_a_gpu_computes_more_tokens_in_a_step(gpu: EmulatedGpu) -> None:
    assert make_parts().settings.max_num_batched_tokens == 2048
    assert make_parts(device="cpu").settings.max_num_batched_tokens == 512
    assert make_parts(max_num_batched_tokens=100).settings.max_num_batched_tokens == 100


def test_the_cache_is_sized_by_the_gpus_memory(gpu: EmulatedGpu) -> None:
    parts = make_parts()
    assert parts.settings.num_blocks == 4 * 128 // 16, "no more than all can use"
    per_block = bytes_per_block(parts.model, torch.float32, 16)
    gpu.memory = GpuMemory(total=GIB, free=GIB // 2, reserved=GIB // 4, peak=GIB // 2)
    utilization = 3 / 4 + 20.5 * per_block / GIB
    assert make_parts(gpu_memory_utilization=utilization).settings.num_blocks == 20


def test_a_given_number_of_blocks_needs_no_trial(gpu: EmulatedGpu) -> None:
    assert make_parts(num_kv_blocks=77).settings.num_blocks == 77
    assert gpu.num_measurements == 0


def test_too_little_memory_ends_the_start_before_anything_is_made(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.memory = dataclasses.replace(gpu.memory, free=GIB // 20)
    monkeypatch.setattr(build, "build_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(StartupError, match="no memory for a single KV block"):
        make_parts()


def test_a_step_that_leaves_too_little_memory_is_named_as_such(gpu: EmulatedGpu) -> None:
    def measure(work: Any) -> GpuMemory:
        work()
        gpu.num_measurements += 1
        return dataclasses.replace(gpu.memory, peak=0 if gpu.num_measurements == 1 else GIB)

    gpu.memory_during = measure  # type: ignore[method-assign]
    with pytest.raises(StartupError, match=r"^there is no memory for a single KV block.*largest step take 1\.0 GiB"):
        make_parts()
    assert gpu.num_measurements == 2


def start(capsys: pytest.CaptureFixture[str], model: Path) -> str:
    """The message of a server that does not start."""
    flags = ["--model", str(model), "--device", "cuda", "--dtype", "float32", "--port", "0"]
    assert main(flags, build.build_engine, NATIVE) == 1
    output = capsys.readouterr()
    assert "Ready" not in output.out
    return output.err


def test_source_that_does_not_compile(
    gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in cuda.source_folder().iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    lines = (tmp_path / "rotary.cu").read_text().splitlines()
    lines.insert(6, "int broken = nonsense;")
    (tmp_path / "rotary.cu").write_text("\n".join(lines))
    monkeypatch.setattr(cuda, "source_folder", lambda: tmp_path)
    message = start(capsys, cached_checkpoint())
    assert "error: cuda/rotary.cu does not compile with g++ 12:" in message
    assert "rotary.cu:7:" in message and "nonsense" in message


def test_heads_without_an_instance(gpu: EmulatedGpu, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cached_checkpoint(head_dim=264, num_hidden_layers=1)
    message = start(capsys, folder)
    assert "error: the model's heads have 264 dimensions" in message and "--device cpu" in message
