"""Decodes captured in CUDA graphs, one for each size of a batch, and replayed. Knows no request and no model.

A captured step computes as many sequences as its size, of which the last may be none: the tensors hold slots of -1 and
contexts of 0 there (`step_buffers.py`). Every launch is made for the longest context that the graph is for.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import product
from typing import TypeAlias

from tqdm import tqdm

from vllm_lite.engine.step import StepShape
from vllm_lite.worker.compute import Compute, Head

logger = logging.getLogger(__name__)

MOST_SEQS = 512
"""A larger batch keeps the GPU busy for longer than Python takes to launch its kernels."""
SHORTEST_CONTEXT = 4096
CONTEXT_GROWTH = 8
"""In a launch for long contexts, most blocks of threads find nothing to do where the contexts are short."""

Replay: TypeAlias = Callable[[], None]
Capture: TypeAlias = Callable[[Callable[[], None]], Replay]
"""Calls a function once to warm up and once to record it; what comes back does what was recorded."""


class CudaGraphs:
    """A `Compute`: replays steps in which every sequence brings one token, hands all others to `compute`.

    Everything is captured here, while nobody waits for an answer. The step's tensors must hold a step that neither
    reads nor writes the cache, and no op may need more scratch memory later than it has taken already.
    """

    def __init__(
        self, compute: Compute, capture: Capture, *, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._compute = compute
        self._batch_sizes = batch_sizes(min(max_num_seqs, max_num_batched_tokens))
        self._contexts = context_sizes(max_model_len)
        self._graphs: dict[tuple[int, int, Head], Replay] = {}
        start = time.monotonic()
        heads = (Head.GREEDY_IDS, Head.LOGITS)
        # The largest first: their memory serves the smaller ones too.
        keys = list(product(reversed(self._batch_sizes), reversed(self._contexts), heads))
        for key in tqdm(keys, desc="Capturing decodes", disable=None):
            self._graphs[key] = capture(lambda key=key: self._compute_captured(*key))  # type: ignore[misc]
        logger.info("%d CUDA graphs captured in %.1f s", len(keys), time.monotonic() - start)

    def __call__(self, shape: StepShape, head: Head) -> None:
        """As `Compute`."""
        if shape.num_tokens != shape.num_seqs or shape.num_seqs > self._batch_sizes[-1]:
            self._compute(shape, head)
            return
        batch_size = _at_least(shape.num_seqs, self._batch_sizes)
        context = _at_least(shape.max_context_len, self._contexts)
        self._graphs[batch_size, context, Head.LOGITS if head is Head.NONE else head]()

    def _compute_captured(self, batch_size: int, context: int, head: Head) -> None:
        shape = StepShape(
            num_tokens=batch_size,
            num_seqs=batch_size,
            num_decodes=batch_size,
            max_query_len=1,
            max_context_len=context,
            num_rows=batch_size,
        )
        self._compute(shape, head)


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64 and so on up to `most`, which is among them unless it is beyond `MOST_SEQS`."""
    most = min(most, MOST_SEQS)
    powers = [2**i for i in range(MOST_SEQS.bit_length())]
    sizes = {*powers, *(3 * power // 2 for power in powers if power >= 16)}
    return sorted({most, *(size for size in sizes if size < most)})


def context_sizes(longest: int) -> list[int]:
    """From the shortest that is worth a graph of its own up to the longest."""
    sizes = [longest]
    size = SHORTEST_CONTEXT
    while size < longest:
        sizes.append(size)
        size *= CONTEXT_GROWTH
    return sorted(sizes)


def _at_least(size: int, sizes: list[int]) -> int:
    return sizes[bisect_left(sizes, size)]
