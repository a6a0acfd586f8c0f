"""Copies a checkpoint's tensors into a model's parameters. Knows neither file formats nor architectures."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from vllm_lite.errors import StartupError
from vllm_lite.kernels.topology import available_cpus

logger = logging.getLogger(__name__)

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HEADS = ("lm_head.weight", "embed_out.weight")
"""What checkpoints call the matrix that gives the logits."""
NUM_NAMES_SHOWN = 5
MAX_LOADING_THREADS = 8
"""More would only wait for memory."""
PIECE_SIZE = 2**18
"""Elements of a quantised tensor that are read at a time: what they are expanded into stays in a core's cache."""
PLAIN_PIECE_BYTES = 16 * 2**20
"""Of other tensors, at most: for each piece the file is opened anew, which takes up to half a millisecond."""
MIN_NUM_PIECES = 256
"""That many make up all weights, so that those which the threads hold at a time are a small part of a small model."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint under its Hugging Face name, whatever the file format.

    `read` brings some of the values in, picked along the first dimension, may be called from any thread, and raises
    StartupError where the file is broken. `dtype` is what the file stores, None where that is a quantised type.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[slice], torch.Tensor]
    dtype: torch.dtype | None = None

    def pieces(self, num_weights: int, multiple_of: int = 1) -> Iterator[slice]:
        """The whole tensor as slices of its first dimension, small beside the `num_weights` elements that are read.

        Each begins at a multiple of that many rows.
        """
        size = PIECE_SIZE
        if self.dtype is not None:
            size = max(size, min(PLAIN_PIECE_BYTES // self.dtype.itemsize, num_weights // MIN_NUM_PIECES))
        num_rows, *sizes = self.shape
        step = max(1, size // max(1, math.prod(sizes)) // multiple_of) * multiple_of
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def load_weights(
    tensors: Iterable[CheckpointTensor], targets: Mapping[str, torch.Tensor], ignored: Callable[[str], bool]
) -> None:
    """Copies each tensor into the target of its name, in parallel, piece by piece, converted to the target's dtype.

    A target of more than two dimensions has the tensor's first dimension in its own first three: where the checkpoint
    fuses queries, keys and values head by head, [num_heads, 3, head_dim] for the rows of a weight or of a bias.

    Names and shapes are checked before anything is read. Raises StartupError for a target without a tensor and for a
    wrong shape or dtype; tensors without a target that are not `ignored` are named in one warning.
    """
    by_name: dict[str, CheckpointTensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            raise StartupError(f"the checkpoint holds tensor {tensor.name} twice; keep one of its weight files.")
        by_name[tensor.name] = tensor
    _check(by_name, targets)
    _warn_of_leftovers([name for name in by_name if name not in targets and not ignored(name)])

    def copy(piece: tuple[str, slice]) -> None:
        name, rows = piece
        with torch.inference_mode():
            source = by_name[name].read(rows)
            if source.dtype not in FLOAT_DTYPES:
                raise StartupError(f"tensor {name} is stored as {source.dtype}: only unquantised weights can be read.")
            target = targets[name]
            num_rows = _rows_of_an_index(target)
            part = target[rows.start // num_rows : rows.stop // num_rows]
            part.copy_(source.view(part.shape))

    num_weights = sum(target.numel() for target in targets.values())
    pieces = [
        (name, rows)
        for name, target in targets.items()
        for rows in by_name[name].pieces(num_weights, _rows_of_an_index(target))
    ]
    num_threads = min(num_available_cores(), MAX_LOADING_THREADS)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load-weights") as pool:
        for _ in pool.map(copy, pieces):
            pass


def fill_with_random(targets: Mapping[str, torch.Tensor], seed: int) -> None:
    """Small random numbers (uniform, within 0.02) that depend on the seed and the tensor's name only."""
    for name, target in targets.items():
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        with torch.inference_mode():
            target.uniform_(-0.02, 0.02, generator=generator)


def num_available_cores() -> int:
    """The cores that this process may use."""
    return len(available_cpus())


def _rows_of_an_index(target: torch.Tensor) -> int:
    """How many rows of the checkpoint's tensor the target holds under one index of its first dimension."""
    return math.prod(target.shape[1:3]) if target.dim() > 2 else 1


def _shape_in_checkpoint(target: torch.Tensor) -> tuple[int, ...]:
    shape = tuple(target.shape)
    return (math.prod(shape[:3]), *shape[3:]) if target.dim() > 2 else shape


def _check(by_name: Mapping[str, CheckpointTensor], targets: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in targets if name not in by_name]
    if missing:
        hint = " (the checkpoint's configuration says that it is not tied to the embedding)"
        raise StartupError(
            f"the checkpoint lacks {_listed(missing)} which the model needs"
            f"{hint if len(missing) == 1 and missing[0] in HEADS else ''}; download it again or name another one."
        )
    for name, target in targets.items():
        if by_name[name].shape != _shape_in_checkpoint(target):
            raise StartupError(
                f"tensor {name} has shape {list(by_name[name].shape)} in the checkpoint, but its configuration asks "
                f"for {list(_shape_in_checkpoint(target))}: configuration and weights do not belong together."
            )


def _warn_of_leftovers(names: list[str]) -> None:
    if names:
        logger.warning("the model has no use for %s of the checkpoint", _listed(names))


def _listed(names: list[str]) -> str:
    noun = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    rest = ", ..." if len(names) > NUM_NAMES_SHOWN else ""
    return f"{noun} {', '.join(names[:NUM_NAMES_SHOWN])}{rest}"
