"""Random numbers that are named, not drawn: a seed and a position give the same number wherever and whenever."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STRIDE = np.uint64(0x9E3779B97F4A7C15)
"""The odd number nearest to 2**64 divided by the golden ratio: multiples of it spread evenly."""


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) with 53 random bits for each pair of a seed and a position."""
    bits = _mix(_mix(seeds) + positions.astype(np.uint64) * STRIDE)
    numbers: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The step of SplitMix64 (Steele, Lea, Flood 2014): every bit of x changes half of the result's bits."""
    x = x + STRIDE
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
