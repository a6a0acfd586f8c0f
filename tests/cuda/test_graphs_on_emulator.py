"""Captured decodes on the emulated kernels: the tokens of steps run by Python, and no write beyond a step's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cuda.emulator import missing_requirement
from tests.helpers.checkpoints import cached_checkpoint, reference_greedy
from tests.helpers.emulated_gpu import EmulatedGpu
from tests.helpers.runner import DrivenSequence, make_step
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig
from vllm_lite.engine.step import StepShape
from vllm_lite.errors import StartupError
from vllm_lite.worker import cuda_graphs
from vllm_lite.worker.compute import Head
from vllm_lite.worker.model_runner import ModelRunner

MISSING = missing_requirement()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

NUM_TOKENS = 10
PROMPTS = [[(17 * i + 5 * n) % 254 + 2 for i in range(n)] for n in (1, 7, 8, 17, 30)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    gpu = EmulatedGpu()
    monkeypatch.setattr(build, "find_gpu", lambda wanted: gpu)
    monkeypatch.setattr(cuda_graphs, "SHORTEST_CONTEXT", 16)
    monkeypatch.setattr(cuda_graphs, "CONTEXT_GROWTH", 2)
    return gpu


def make_parts(**fields: Any) -> build.EngineParts:
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "max_model_len": 64, "num_kv_blocks": 40, "block_size": 8}
    common = {"model": str(cached_checkpoint()), "num_threads": 1, "dtype": "float32", "seed": 0}
    config = EngineConfig(**{**common, **sizes, **fields})
    return build.build_parts(config)


def runner_of(parts: build.EngineParts) -> ModelRunner:
    return parts.executor._runner


def run(parts: build.EngineParts, params: list[SamplingParams], steps_between: int = 2) -> list[list[int]]:
    """Requests arrive some steps apart, so that batches grow and shrink."""
    ids: list[list[int]] = [[] for _ in PROMPTS]

    def step() -> None:
        for delta in parts.engine.step(parts.executor):
            ids[int(delta.request_id)].extend(delta.outputs[0].token_ids)

    for index, prompt in enumerate(PROMPTS):
        parts.engine.add_request(str(index), None, list(prompt), params[index])
        for _ in range(steps_between):
            step()
    while parts.engine.has_unfinished:
        step()
    return ids


def params_of(kind: str) -> list[SamplingParams]:
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 9}, {}, {"top_p": 0.7}, {"temperature": 0.0}]
    if kind == "greedy":
        settings = [{"temperature": 0.0}] * len(PROMPTS)
    return [
        SamplingParams(max_tokens=NUM_TOKENS + 2 * i, ignore_eos=True, seed=i, **fields)
        for i, fields in enumerate(settings)
    ]


@pytest.mark.parametrize(
    ("sizes", "steps_between"),
    [({}, 2), ({"num_kv_blocks": 9}, 0), ({"max_num_seqs": 3}, 2)],
    ids=["all", "preemption", "three"],
)
@pytest.mark.parametrize("kind", ["greedy", "mixed"])
def test_tokens_are_those_of_steps_run_by_python(
    gpu: EmulatedGpu, kind: str, sizes: dict[str, int], steps_between: int
) -> None:
    parts = make_parts(**sizes)
    captured = run(parts, params_of(kind), steps_between)
    assert (parts.engine.stats().num_preemptions > 0) == ("num_kv_blocks" in sizes)
    assert sum(graph.num_replays > 0 for graph in gpu.graphs) >= 6, "batches and contexts of several sizes"
    num_graphs = len(gpu.graphs)
    assert captured == run(make_parts(**sizes, enforce_eager=True), params_of(kind), steps_between)
    assert len(gpu.graphs) == num_graphs
    assert len({token for ids in captured for token in ids}) > 10


def test_a_replay_writes_its_own_slots_and_nothing_else(gpu: EmulatedGpu) -> None:
    """Three sequences in a graph of four, in a cache of NaN, which the fourth would read."""
    runner = runner_of(make_parts())
    for cache in runner.caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    sequences = [DrivenSequence(list(range(2, 2 + n)), blocks) for n, blocks in ((9, [4, 2]), (3, [7]), (5, [1]))]
    for sequence in sequences:
        runner.run(make_step(8, [(sequence, len(sequence.token_ids))]))
        sequence.num_computed = len(sequence.token_ids)
        sequence.token_ids.append(100)
    before = [cache.key.clone() for cache in runner.caches]
    replays = [graph.num_replays for graph in gpu.graphs]
    output = runner.run(make_step(8, [(sequence, 1) for sequence in sequences]))
    assert [graph.num_replays for graph in gpu.graphs] != replays
    assert len(output.token_ids) == 3 and (output.token_ids >= 0).all()
    written = {(sequence.block_ids[sequence.num_computed // 8], sequence.num_computed % 8) for sequence in sequences}
    for cache, old in zip(runner.caches, before):
        changed = (cache.key != old) & ~(cache.key.isnan() & old.isnan())
        slots = {(int(block), int(offset)) for block, _, offset, _ in changed.nonzero()}
        assert slots == written


def test_numbers_that_python_worked_out_are_stale_in_a_replay(gpu: EmulatedGpu) -> None:
    """The recording is as strict as a graph: without this, the tests above would prove nothing."""
    runner = runner_of(make_parts(enforce_eager=True))
    chosen = [5]
    out = torch.zeros(2)

    def compute(shape: StepShape, head: Head) -> None:
        out.copy_(runner.tensors.token_ids[:2].float() + chosen[0])

    replay = gpu.capture(lambda: compute(StepShape(2, 2, 2, 1, 1), Head.NONE))
    runner.tensors.token_ids[:2] = torch.tensor([1, 2], dtype=torch.int32)
    chosen[0] = 100
    replay()
    assert out.tolist() == [6, 7]

    def read_back() -> None:
        out.fill_(out.sum().item())

    with pytest.raises(RuntimeError, match="reads back"):
        gpu.capture(read_back)


def test_memory_that_graphs_use_is_never_given_up(gpu: EmulatedGpu) -> None:
    parts = make_parts()
    runner = runner_of(parts)
    buffer = runner.workspace._buffer
    run(parts, params_of("mixed"))
    assert runner.workspace._buffer is buffer


def test_case_f2_nothing_is_left_to_be_made_when_the_server_is_ready(gpu: EmulatedGpu) -> None:
    """The first request compiles and captures nothing; its time is measured by scripts/gpu_check."""
    parts = make_parts()
    made = gpu.num_modules, len(gpu.graphs)
    assert all(made)
    run(parts, params_of("mixed"))
    assert (gpu.num_modules, len(gpu.graphs)) == made


def fail_to_capture(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The real `capture`, on a machine where torch can capture nothing."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fail)
    super(EmulatedGpu, EmulatedGpu()).capture(lambda: None)


def test_what_cannot_be_captured_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "CUDA error: operation not permitted when stream is capturing"
    with pytest.raises(StartupError, match=rf"^a decode cannot be captured.*\({reason}\): use --enforce-eager$"):
        fail_to_capture(monkeypatch, RuntimeError(f"{reason}\nat x"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
    ids=["memory", "access", "assert"],
)
def test_what_fails_for_another_reason_than_its_capture_stays_what_it_is(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError) as raised:
        fail_to_capture(monkeypatch, error)
    assert raised.value is error


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "gpt_neox"])
def test_captured_decodes_of_models_with_layer_norms(gpu: EmulatedGpu, family: str) -> None:
    overrides: dict[str, Any] = {"word_embed_proj_dim": 32} if family == "opt" else {}
    folder = cached_checkpoint(family, **overrides)
    parts = make_parts(model=str(folder), max_num_seqs=3)
    expected = [reference_greedy(folder, prompt, NUM_TOKENS + 2 * i) for i, prompt in enumerate(PROMPTS)]
    assert run(parts, params_of("greedy")) == expected
