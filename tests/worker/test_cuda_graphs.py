"""Which graph a step takes, and which step takes none. The graphs themselves are recordings here."""

from __future__ import annotations

import pytest

from vllm_lite.engine.step import StepShape
from vllm_lite.worker.compute import Head
from vllm_lite.worker.cuda_graphs import MOST_SEQS, CudaGraphs, Replay, batch_sizes, context_sizes


def test_sizes_of_batches() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert batch_sizes(256) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert batch_sizes(10**6) == batch_sizes(MOST_SEQS) == [*batch_sizes(256), 384, 512]


def test_sizes_of_contexts() -> None:
    assert context_sizes(128) == [128]
    assert context_sizes(4096) == [4096]
    assert context_sizes(8192) == [4096, 8192]
    assert context_sizes(131072) == [4096, 32768, 131072]


class Recorder:
    """As the model runner's `compute` and as what captures it."""

    def __init__(self) -> None:
        self.eager: list[tuple[StepShape, Head]] = []
        self.captured: list[tuple[StepShape, Head]] = []
        self.replayed: list[tuple[StepShape, Head]] = []

    def compute(self, shape: StepShape, head: Head) -> None:
        self.eager.append((shape, head))

    def capture(self, function: Replay) -> Replay:
        function()
        call = self.eager.pop()
        self.captured.append(call)
        return lambda: self.replayed.append(call)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def make_graphs(recorder: Recorder, **changes: int) -> CudaGraphs:
    sizes = {"max_model_len": 10000, "max_num_seqs": 40, "max_num_batched_tokens": 512, **changes}
    return CudaGraphs(recorder.compute, recorder.capture, **sizes)


def decodes(num_seqs: int, context: int, num_rows: int | None = None) -> StepShape:
    return StepShape(num_seqs, num_seqs, num_seqs, 1, context, num_seqs if num_rows is None else num_rows)


def test_all_are_captured_first_and_the_largest_before_the_smaller(recorder: Recorder) -> None:
    make_graphs(recorder)
    sizes = [shape.num_seqs for shape, _ in recorder.captured]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {1, 2, 4, 8, 16, 24, 32, 40}
    assert len(recorder.captured) == len(set(recorder.captured)) == 8 * 2 * 2
    for shape, _ in recorder.captured:
        assert shape == decodes(shape.num_seqs, shape.max_context_len)


@pytest.mark.parametrize("head", [Head.GREEDY_IDS, Head.LOGITS])
def test_a_step_takes_the_smallest_graph_that_holds_it(recorder: Recorder, head: Head) -> None:
    graphs = make_graphs(recorder)
    for num_seqs in range(1, 41):
        for context in (1, 4095, 4096, 4097, 10000):
            graphs(decodes(num_seqs, context), head)
            shape, replayed_head = recorder.replayed.pop()
            assert replayed_head is head
            assert shape.num_seqs == min(size for size in batch_sizes(40) if size >= num_seqs)
            assert shape.max_context_len == min(size for size in (4096, 10000) if size >= context)
    assert not recorder.replayed and not recorder.eager


def test_decodes_that_bring_no_row_or_not_all_take_a_graph_too(recorder: Recorder) -> None:
    graphs = make_graphs(recorder)
    graphs(decodes(3, 100, num_rows=0), Head.NONE)
    graphs(decodes(3, 100, num_rows=1), Head.GREEDY_IDS)
    assert [(shape.num_seqs, head) for shape, head in recorder.replayed] == [(4, Head.LOGITS), (4, Head.GREEDY_IDS)]


@pytest.mark.parametrize(
    "shape",
    [StepShape(9, 3, 2, 7, 30, 3), StepShape(5, 1, 0, 5, 5, 0), decodes(41, 30)],
    ids=["mixed", "chunk", "batch-beyond-the-largest"],
)
def test_other_steps_run_by_python(recorder: Recorder, shape: StepShape) -> None:
    make_graphs(recorder)(shape, Head.GREEDY_IDS)
    assert recorder.eager == [(shape, Head.GREEDY_IDS)]
    assert not recorder.replayed


def test_no_graph_has_more_tokens_than_a_step(recorder: Recorder) -> None:
    make_graphs(recorder, max_num_batched_tokens=6)
    assert {shape.num_seqs for shape, _ in recorder.captured} == {1, 2, 4, 6}
