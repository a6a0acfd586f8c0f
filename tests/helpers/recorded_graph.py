"""Stands in for a CUDA graph on a CPU: what was done once, with the very same memory, is done again.

Only torch's operations and the launches of kernels are recorded, no Python: numbers that Python worked out of a step,
and tensors that have been replaced since, are stale in a replay, as they would be on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_BACK = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_replays = 0
        self._calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.name().split(".")[0] in READS_BACK:
            raise RuntimeError(f"{func.name()} reads back, which a captured step cannot")
        result = func(*args, **(kwargs or {}))
        self._calls.append(partial(_do_again, partial(func, *args, **(kwargs or {})), result))
        return result

    def add(self, launch: Callable[[], None]) -> None:
        """A launch of a kernel, of which torch knows nothing."""
        self._calls.append(launch)

    def replay(self) -> None:
        self.num_replays += 1
        for call in self._calls:
            call()


def _do_again(call: Callable[[], Any], first_result: Any) -> None:
    """Where torch has made a new tensor, its numbers go where they went the first time."""
    for old, new in zip(tree_leaves(first_result), tree_leaves(call())):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
