"""From numpy to the device without waiting for it. Knows no step.

On a GPU the numbers go through pinned memory of torch's cache, which hands a piece out again only once the copies out
of it have been made.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def host_tensor(num_elements: int, device: torch.device) -> torch.Tensor:
    """[num_elements] int32, uninitialised, in host memory that the device copies from by itself. For one use."""
    return torch.empty(num_elements, dtype=torch.int32, pin_memory=device.type == "cuda")


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy, there by the time that the current stream comes to it; the array may be read-only."""
    tensor = torch.tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
