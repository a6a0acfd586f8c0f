"""What a model runner has computed in a step: the model, and as much of the head as the sampled rows need."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TypeAlias

from vllm_lite.engine.step import StepShape


class Head(Enum):
    """What becomes of the sampled rows."""

    NONE = auto()
    """There are none."""
    GREEDY_IDS = auto()
    LOGITS = auto()


Compute: TypeAlias = Callable[[StepShape, Head], None]
"""Computes the step whose numbers lie in the runner's tensors: by Python, or by replaying what Python did once."""
