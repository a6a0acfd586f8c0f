"""Copying tensors into targets: values, conversions, and every way in which file and model do not fit."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from vllm_lite.errors import StartupError
from vllm_lite.worker.weights import CheckpointTensor, fill_with_random, load_weights


def stored(name: str, tensor: torch.Tensor) -> CheckpointTensor:
    return CheckpointTensor(name, tuple(tensor.shape), lambda rows: tensor[rows], tensor.dtype)


def ignore_nothing(name: str) -> bool:
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_of_a_fused_parameter_are_filled_and_converted(dtype: torch.dtype) -> None:
    fused = torch.nn.Parameter(torch.full((6, 4), torch.nan, dtype=dtype))
    values = torch.randn(6, 4)

    load_weights([stored("q", values[:4]), stored("k", values[4:])], {"q": fused[:4], "k": fused[4:]}, ignore_nothing)

    assert torch.equal(fused, values.to(dtype))


def test_a_target_may_be_transposed() -> None:
    parameter, values = torch.full((3, 50), torch.nan), torch.randn(50, 3)

    load_weights([stored("a", values)], {"a": parameter.t()}, ignore_nothing)

    assert torch.equal(parameter, values.t())


@pytest.mark.parametrize("size", [(), (7,), (2**13,)])
def test_a_target_may_unfold_the_first_dimension(size: tuple[int, ...]) -> None:
    """Fused head by head in the file, queries before keys before values in the parameter."""
    num_heads, head_dim = 5, 4
    parameter, values = torch.full((3, num_heads, head_dim, *size), torch.nan), torch.randn(60, *size)
    pieces = list(stored("a", values).pieces(values.numel(), multiple_of=3 * head_dim))

    load_weights([stored("a", values)], {"a": parameter.transpose(0, 1)}, ignore_nothing)

    assert (len(pieces) > 1) == (size == (2**13,))
    for head in range(num_heads):
        for part in range(3):
            rows = slice((head * 3 + part) * head_dim, (head * 3 + part + 1) * head_dim)
            assert torch.equal(parameter[part, head], values[rows])


@pytest.mark.parametrize("shape", [(61, 7), (60, 8), (60,), (5, 3, 4, 7), (420,), (60, 7, 1)])
def test_another_shape_than_the_folded_one_is_refused(shape: tuple[int, ...]) -> None:
    target = torch.zeros(5, 3, 4, 7)

    with pytest.raises(StartupError, match=r"tensor a has shape .* asks for \[60, 7\]"):
        load_weights([stored("a", torch.ones(shape))], {"a": target}, ignore_nothing)
    assert not target.any()


def test_each_tensor_is_read_once_and_what_has_no_target_never() -> None:
    reads: list[str] = []
    lock = threading.Lock()

    def counted(name: str) -> CheckpointTensor:
        def read(rows: slice) -> torch.Tensor:
            with lock:
                reads.append(name)
            return torch.ones(2)[rows]

        return CheckpointTensor(name, (2,), read)

    load_weights([counted("a"), counted("b"), counted("c")], {"a": torch.zeros(2), "b": torch.zeros(2)}, ignore_nothing)

    assert sorted(reads) == ["a", "b"]


@pytest.mark.parametrize(
    ("dtype", "num_weights", "rows"),
    [
        (torch.bfloat16, 2**33, 2048),
        (torch.float32, 2**33, 1024),
        (torch.bfloat16, 2**27, 128),
        (torch.bfloat16, 2**20, 64),
        (None, 2**33, 64),
    ],
)
def test_pieces_are_large_where_little_is_made_of_them_and_small_beside_the_model(
    dtype: torch.dtype | None, num_weights: int, rows: int
) -> None:
    pieces = list(CheckpointTensor("a", (5000, 4096), lambda rows: torch.empty(0), dtype).pieces(num_weights))
    assert pieces[0] == slice(0, rows)
    assert [row for piece in pieces for row in range(5000)[piece]] == list(range(5000))


def test_a_missing_tensor_is_named_before_anything_is_read() -> None:
    def read(rows: slice) -> torch.Tensor:
        raise AssertionError("read although a tensor is missing")

    tensors = [CheckpointTensor("a", (2,), read)]
    with pytest.raises(StartupError, match=r"lacks tensor lm_head.weight which the model needs.*not tied"):
        load_weights(tensors, {"a": torch.zeros(2), "lm_head.weight": torch.zeros(2)}, ignore_nothing)


def test_many_missing_tensors_are_counted_and_the_first_named() -> None:
    with pytest.raises(StartupError, match=r"lacks 7 tensors: t0, t1, t2, t3, t4, \.\.\. which"):
        load_weights([], {f"t{i}": torch.zeros(1) for i in range(7)}, ignore_nothing)


def test_a_wrong_shape_names_the_tensor_and_both_shapes() -> None:
    with pytest.raises(StartupError, match=r"tensor a has shape \[3, 2\] .* asks for \[2, 3\]"):
        load_weights([stored("a", torch.zeros(3, 2))], {"a": torch.zeros(2, 3)}, ignore_nothing)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(StartupError, match=f"tensor a is stored as {dtype}"):
        load_weights([stored("a", torch.zeros(2).to(dtype))], {"a": torch.zeros(2)}, ignore_nothing)


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    with pytest.raises(StartupError, match="holds tensor a twice"):
        load_weights([stored("a", torch.zeros(2)), stored("a", torch.ones(2))], {"a": torch.zeros(2)}, ignore_nothing)


def test_an_error_while_reading_reaches_the_caller() -> None:
    def read(rows: slice) -> torch.Tensor:
        raise StartupError("shard 2 is broken")

    tensors = [stored("a", torch.zeros(2)), CheckpointTensor("b", (2,), read)]
    with pytest.raises(StartupError, match="shard 2 is broken"):
        load_weights(tensors, {"a": torch.zeros(2), "b": torch.zeros(2)}, ignore_nothing)


def test_leftovers_are_named_in_one_warning_unless_ignored(caplog: pytest.LogCaptureFixture) -> None:
    tensors = [stored(name, torch.zeros(2)) for name in ("a", "adapter.x", "adapter.y", "rotary.inv_freq")]

    with caplog.at_level(logging.WARNING):
        load_weights(tensors, {"a": torch.zeros(2)}, lambda name: name.endswith("inv_freq"))

    assert [record.getMessage() for record in caplog.records] == [
        "the model has no use for 2 tensors: adapter.x, adapter.y of the checkpoint"
    ]


def test_dummy_weights_are_small_repeatable_and_differ_by_name() -> None:
    first = {"a": torch.full((100,), torch.nan), "b": torch.full((100,), torch.nan, dtype=torch.bfloat16)}
    second = {"b": torch.zeros(100, dtype=torch.bfloat16), "a": torch.zeros(100)}
    fill_with_random(first, seed=0)
    fill_with_random(second, seed=0)

    for name in first:
        assert torch.equal(first[name], second[name])
        assert 0.01 < first[name].abs().max() <= 0.02
    assert not torch.allclose(first["a"], first["b"].float(), atol=1e-3)
