"""Checks of the kernels alone: that they compile, agree with the emulator, and how fast they are."""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_checks.cases import BF16, F16, F32, Case, all_cases
from scripts.gpu_checks.outcome import Outcome, passed_if
from vllm_lite.engine.step import StepShape
from vllm_lite.kernels.cuda import CudaKernels
from vllm_lite.ops.attention import attend
from vllm_lite.ops.cuda_kernels import every_kernel
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker.gpu import Gpu

GIB = 2**30
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
"""Of Llama 8B."""
COPY_BYTES = 4 * GIB
GOAL = 0.85
"""Of the copy's bandwidth, at batch 16 and a context of 8k."""
SLEEP_CYCLES = 50_000_000
"""Some 30 ms."""
NUM_LAUNCHES = 500
"""Fewer than a stream queues."""

Timer = Callable[[Callable[[], object]], float]
"""Seconds of one call."""


def load_kernels(gpu: Gpu) -> CudaKernels:
    """All of them, for all dtypes and sizes of heads."""
    gpu.make_current()
    return CudaKernels(every_kernel(), gpu.device, gpu.compiler)


def check_compilation(gpu: Gpu) -> Outcome:
    """Every instance goes through RawModule; registers and local memory are those of the loaded kernels."""
    start = time.monotonic()
    kernels = load_kernels(gpu)
    seconds = time.monotonic() - start
    usages = {name: _usage(function) for name, (function, _) in kernels._functions.items()}
    spilling = [name for name, usage in usages.items() if usage.get("local_size_bytes")]
    summary = f"{len(usages)} instances in {seconds:.1f} s, {len(spilling)} use local memory"
    return Outcome("ok", summary, {"seconds": seconds, "instances": usages})


def _usage(function: Any) -> dict[str, int]:
    names = ("num_regs", "local_size_bytes", "shared_size_bytes", "max_dynamic_shared_size_bytes")
    return {name: getattr(function, name) for name in names if hasattr(function, name)}


def check_against_emulator(gpu: Gpu) -> Outcome:
    """The same inputs on both; and on the GPU against the reference, which needs no compiler."""
    kernels = load_kernels(gpu)
    cases = all_cases()
    on_gpu = results_of(cases, kernels, gpu.device)
    reference = results_of(cases, None, torch.device("cpu"))
    figures = {"gpu against the reference": errors(cases, on_gpu, reference)}
    try:
        emulator = importlib.import_module("tests.cuda.emulator")
        missing = emulator.missing_requirement()
    except ImportError as error:
        missing = str(error)
    if missing is not None:
        return _comparison(figures, "unavailable", f"; no emulator: {missing}")
    _let_compilers_find_cuda()
    try:
        emulated = emulator.EmulatedKernels(every_kernel(), is_checked=False)
    except (AssertionError, emulator.EmulatorCompileError) as error:  # CUDA's headers are missing
        return _comparison(figures, "unavailable", f"; no emulator: {str(error).strip().splitlines()[0]}")
    on_emulator = results_of(cases, emulated, torch.device("cpu"))
    figures["gpu against the emulator"] = errors(cases, on_gpu, on_emulator)
    same = sum(all(map(_is_same, a.values(), b.values())) for a, b in zip(on_gpu, on_emulator))
    return _comparison(figures, "ok", f"; {same} of {len(cases)} cases bit for bit as the emulator")


def _let_compilers_find_cuda() -> None:
    """g++ looks here for the headers that no wheel has brought, if there is a CUDA toolkit."""
    if nvcc := shutil.which("nvcc"):
        os.environ["CPATH"] = str(Path(nvcc).resolve().parents[1] / "include")


def results_of(
    cases: Sequence[Case], kernels: CudaKernels | None, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """By the kernels, or by the reference where there are none."""
    workspace = Workspace(device, frozenset({F32, BF16, F16}), cuda=kernels)
    return [case.results(workspace, device) for case in cases]


def errors(
    cases: Sequence[Case], results: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]]
) -> dict[str, float]:
    """By the name of each case, in units of what is allowed."""
    return {case.name: case.error(a, b) for case, a, b in zip(cases, results, expected, strict=True)}


def _comparison(figures: dict[str, dict[str, float]], status: Any, remark: str) -> Outcome:
    wrong = {f"{name} ({pair})" for pair, by_name in figures.items() for name, error in by_name.items() if error > 1}
    worst = max(error for by_name in figures.values() for error in by_name.values())
    summary = f"worst error {worst:.2f} of what is allowed{remark}"
    if wrong:
        return Outcome("failed", f"{len(wrong)} wrong, such as {sorted(wrong)[0]}; {summary}", {"errors": figures})
    return Outcome(status, summary, {"errors": figures})


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_streams(gpu: Gpu) -> Outcome:
    """Kernels run on torch's current stream: after what that was given before, which takes a while here."""
    kernels = load_kernels(gpu)
    wrong = []
    for case in all_cases():
        workspace = Workspace(gpu.device, frozenset({F32, BF16, F16}), cuda=kernels)
        expected = case.results(workspace, gpu.device)
        if case.error(results_on_side_stream(case, workspace, gpu.device), expected) > 0:
            wrong.append(case.name)
    summary = f"{len(wrong)} of {len(all_cases())} cases differ on a stream of their own"
    return passed_if(not wrong, summary, wrong=wrong)


def results_on_side_stream(case: Case, workspace: Workspace, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs arrive on the stream late: a kernel on another one would have run before."""
    tensors = {name: torch.zeros_like(tensor, device=device) for name, tensor in case.inputs.items()}
    arriving = {name: tensor.to(device) for name, tensor in case.inputs.items()}
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.inference_mode():
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        for name, tensor in tensors.items():
            tensor.copy_(arriving[name])
        workspace.begin_step()
        case.call(workspace, tensors)
    stream.synchronize()
    return {name: tensors[name].cpu() for name in case.outputs}


def run_every_kernel(gpu: Gpu) -> Outcome:
    """What a sanitizer watches."""
    cases = all_cases()
    results_of(cases, load_kernels(gpu), gpu.device)
    torch.cuda.synchronize(gpu.device)
    return Outcome("ok", f"{len(cases)} cases run")


def check_bandwidth(gpu: Gpu) -> Outcome:
    """Decode attention at several batches and contexts against a copy within the GPU, in bfloat16."""
    kernels = load_kernels(gpu)
    free = torch.cuda.mem_get_info(gpu.device)[0]
    copied = copy_bandwidth(gpu.device, COPY_BYTES, seconds_by_events)
    sizes = [(batch, context) for batch in (1, 16, 128) for context in (1024, 8192, 32768)]
    fitting = [size for size in sizes if kv_bytes(*size) < 0.8 * (free - 2 * COPY_BYTES)]
    attended = {size: decode_bandwidth(kernels, gpu.device, *size, seconds_by_events) for size in fitting}
    return bandwidth_outcome(copied, attended)


def bandwidth_outcome(copied: float, attended: dict[tuple[int, int], float]) -> Outcome:
    """Bytes a second; by batch and context. What is below the goal is said, and fails nothing."""
    shares = {f"batch {batch}, context {context}": rate / copied for (batch, context), rate in attended.items()}
    summary = f"copy {copied / 1e12:.2f} TB/s; " + ", ".join(
        f"{b}x{c} {attended[b, c] / copied:.0%}" for b, c in attended
    )
    if (share := shares.get("batch 16, context 8192", 0.0)) < GOAL:
        summary += f"; 16x8192 is below the goal of {GOAL:.0%}"
    return Outcome("ok", summary, {"copy_bytes_per_s": copied, "share_of_copy": shares, "share_at_goal": share})


def kv_bytes(batch: int, context: int) -> int:
    """Of keys and values that a decode reads."""
    return 2 * batch * context * NUM_KV_HEADS * HEAD_DIM * BF16.itemsize


def copy_bandwidth(device: torch.device, num_bytes: int, timer: Timer) -> float:
    """Bytes read and written a second."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer(lambda: target.copy_(source))


def decode_bandwidth(kernels: CudaKernels, device: torch.device, batch: int, context: int, timer: Timer) -> float:
    """Bytes of keys and values a second; every sequence has the whole context."""
    blocks = context // BLOCK_SIZE
    shape = (batch * blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    key_cache, value_cache = (torch.randn(shape, dtype=BF16, device=device) for _ in range(2))
    query = torch.randn(batch, NUM_HEADS, HEAD_DIM, dtype=BF16, device=device)
    out = torch.empty_like(query)
    tables = torch.randperm(batch * blocks, device=device).to(torch.int32).view(batch, blocks)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    workspace = Workspace(device, frozenset({BF16}), cuda=kernels)
    step = StepShape(batch, batch, batch, 1, context)

    def run() -> None:
        attend(
            workspace, step, query, key_cache, value_cache, starts, lens, tables, HEAD_DIM**-0.5, None, None, None, out
        )

    return kv_bytes(batch, context) / timer(run)


def seconds_by_events(function: Callable[[], object], num_calls: int = 10, num_rounds: int = 5) -> float:
    """The median of rounds of calls, replayed from a graph, so that Python's time is not in it."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            function()
    rounds: list[float] = []
    for _ in range(num_rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1000 / num_calls)
    return statistics.median(rounds)


def check_launch_cost(gpu: Gpu) -> Outcome:
    """How long the host is busy with a launch through CuPy, and with one of torch's own to compare."""
    kernels = load_kernels(gpu)
    cost = launch_cost(kernels, gpu.device, lambda: torch.cuda.synchronize(gpu.device))
    x = torch.zeros(64, device=gpu.device)
    torch_cost = host_seconds(lambda: x.add_(1.0), lambda: torch.cuda.synchronize(gpu.device))
    summary = f"{cost * 1e6:.1f} us a launch with 16 arguments through CuPy, torch's add_ {torch_cost * 1e6:.1f} us"
    return Outcome("ok", summary, {"cupy_us": cost * 1e6, "torch_add_us": torch_cost * 1e6})


def launch_cost(kernels: CudaKernels, device: torch.device, synchronize: Callable[[], None]) -> float:
    """Seconds of the host for a prefill of one token."""
    cache = torch.zeros(1, 1, BLOCK_SIZE, 64, device=device)
    query, out = (torch.zeros(2, 1, 64, device=device) for _ in range(2))
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    lens = torch.tensor([2], dtype=torch.int32, device=device)
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    workspace = Workspace(device, cuda=kernels)
    step = StepShape(2, 1, 0, 2, 2)
    return host_seconds(
        lambda: attend(workspace, step, query, cache, cache, starts, lens, tables, 1.0, None, None, None, out),
        synchronize,
    )


def host_seconds(function: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Of one call, without waiting for what it has started."""
    function()
    synchronize()
    start = time.perf_counter()
    for _ in range(NUM_LAUNCHES):
        function()
    seconds = (time.perf_counter() - start) / NUM_LAUNCHES
    synchronize()
    return seconds
