"""The benchmark of the ops, on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from scripts import bench_ops
from scripts.bench.ceilings import Ceilings, measure_ceilings
from scripts.bench.op_cases import MAX_COPIES, MAX_FLOPS_OF_COPIES, Case, OpCases
from tests.helpers.checkpoints import cached_checkpoint
from tests.helpers.cpu_kernels import cpu_space, missing_requirement
from vllm_lite.config import EngineConfig
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker.checkpoint import open_checkpoint

needs_kernels = pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))


def quick_cases(dtype: torch.dtype = torch.float32) -> list[Case]:
    config = open_checkpoint(EngineConfig(model=str(cached_checkpoint("llama")))).config
    return list(OpCases(config, dtype, bench_ops.QUICK.sizes))


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_op_runs_and_the_figures_are_written(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    model = ["--model", str(cached_checkpoint("llama")), "--dtype", dtype, "--threads", "1"]
    assert bench_ops.main(["--quick", *model, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert set(found) == {"machine", "settings", "ceilings", "ops"}
    assert found["ceilings"]["read_gb_per_s"] > 0
    assert found["ceilings"]["gflop_per_s"]["float32"] > 0
    assert {op["op"] for op in found["ops"]} == set(bench_ops.OPS)
    for op in found["ops"]:
        for kind in ("kernel_us", "reference_us"):
            assert 0 < op[kind]["min"] <= op[kind]["median"] <= op[kind]["max"]
        assert op["fraction_of_ceiling"] > 0 and op["gb_per_s"] > 0
        assert op["ceiling"] in ("memory", "arithmetic")
    assert len(capsys.readouterr().out.splitlines()) == len(found["ops"]) + 2


@needs_kernels
def test_chosen_ops_alone_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(cached_checkpoint("llama")), "--dtype", "float32", "--threads", "1"]
    assert bench_ops.main(["--quick", *model, "--ops", "rotary,cache write"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("  ")[0] for line in lines] == ["rotary", "cache write"] * 2


@needs_kernels
def test_kernel_and_reference_are_called_with_the_same_numbers() -> None:
    """Where neither weights nor caches are laid out otherwise, their results can be compared here as they are."""
    compared = 0
    for case in quick_cases():
        if case.op in ("rms_norm", "layer_norm", "rotary"):
            calls = [case.new_call(space) for space in (cpu_space(num_threads=1), Workspace(torch.device("cpu")))]
            outs = []
            for call in calls:
                call()
                outs.append(call.args[-1])  # type: ignore[attr-defined]
            torch.testing.assert_close(*outs)
            compared += 1
    assert compared == 6


def test_work_of_an_op_is_counted() -> None:
    cases = {(case.op, case.size): case for case in quick_cases()}
    linear = cases["linear", "5 x 64 to 96"]
    assert (linear.num_bytes, linear.flops) == (4 * (96 * 64 + 5 * 64 + 5 * 96), 2 * 5 * 64 * 96)
    decode = cases["decode attention", "3 x 1 of 20"]
    keys_and_values, queries_and_results = 2 * 3 * 20 * 2 * 8, 2 * 3 * 8 * 8
    assert decode.num_bytes == 4 * (keys_and_values + queries_and_results)
    assert decode.flops == 4 * 3 * 20 * 8 * 8
    chunk = cases["prefill attention", "1 x 8 of 20"]
    assert chunk.flops == 4 * 8 * 8 * sum(range(13, 21))


def test_weights_are_copied_until_no_cache_holds_them() -> None:
    linear = next(iter(quick_cases()))
    space = Workspace(torch.device("cpu"))
    assert linear.cold_bytes == 4 * 96 * 64
    assert len(linear.calls(space, 3 * linear.cold_bytes - 1)) == 3
    assert len(linear.calls(space, 1)) == 1
    assert len(linear.calls(space, 10**9)) == MAX_COPIES
    weights = {call.args[3].data_ptr() for call in linear.calls(space, 10**9)}  # type: ignore[attr-defined]
    assert len(weights) == MAX_COPIES


def test_large_products_have_few_copies() -> None:
    linear = dataclasses.replace(next(iter(quick_cases())), flops=MAX_FLOPS_OF_COPIES // 2)
    space = Workspace(torch.device("cpu"))
    assert len(linear.calls(space, 10**9)) == 2
    assert len(dataclasses.replace(linear, flops=10**12).calls(space, 10**9)) == 1


def test_the_longer_of_moving_and_computing_is_the_ceiling() -> None:
    ceilings = Ceilings(read_bytes_per_s=100.0, flops_per_s={"float32": 50.0, "bfloat16": 10.0})
    assert ceilings.bound(200, 50) == (2.0, "memory")
    assert ceilings.bound(100, 150) == (3.0, "arithmetic")


def test_ceilings_are_measured_in_both_dtypes() -> None:
    found = measure_ceilings((torch.float32, torch.bfloat16), 2**20, 32)
    assert set(found.flops_per_s) == {"float32", "bfloat16"}
    assert found.read_bytes_per_s > 0 and found.best_flops_per_s > 0
