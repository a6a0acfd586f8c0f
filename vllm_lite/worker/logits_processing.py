"""Changes logits as requests ask, before a token is picked: biases, allowed and banned tokens, penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_lite.engine.step import SamplingInput
from vllm_lite.worker.transfer import to_device

LARGEST_BIAS = 1e30
"""Keeps sums finite; a bias beyond it decides as surely."""
LARGEST_PENALTY = 1e30


def changes_logits(sampling: SamplingInput) -> bool:
    """Whether any row asks for it."""
    lists = (sampling.bias_rows, sampling.allowed_rows, sampling.banned_rows, sampling.history_ids)
    return any(map(len, lists))


def process_logits(logits: torch.Tensor, sampling: SamplingInput) -> None:
    """Applies biases, allowed and banned tokens, then penalties in place.

    logits [R, vocab_size] float32, contiguous. Tokens that may not be picked become -inf; a ban that would leave a row
    without any token is lifted for that row.
    """
    _add_biases(logits, sampling)
    _keep_allowed(logits, sampling)
    _take_out_banned(logits, sampling)
    _penalise(logits, sampling)


def tensor_of(array: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """A copy on the device of `like`; the array may be read-only."""
    return to_device(array, like.device)


def _cells(logits: torch.Tensor, rows: npt.NDArray[Any], ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """[N] int64, where in the flattened logits (row, id) lies."""
    return tensor_of(rows.astype(np.int64) * logits.shape[1] + ids, logits)


def _add_biases(logits: torch.Tensor, sampling: SamplingInput) -> None:
    if len(sampling.bias_rows):
        cells = _cells(logits, sampling.bias_rows, sampling.bias_ids)
        values = tensor_of(np.clip(sampling.bias_values, -LARGEST_BIAS, LARGEST_BIAS), logits)
        logits.view(-1).index_put_((cells,), values, accumulate=True)


def _keep_allowed(logits: torch.Tensor, sampling: SamplingInput) -> None:
    if not len(sampling.allowed_rows):
        return
    rows = tensor_of(sampling.allowed_rows.astype(np.int64), logits)
    is_excluded = torch.ones(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    lines = np.repeat(np.arange(len(rows)), np.diff(sampling.allowed_starts))
    is_excluded.view(-1)[_cells(logits, lines, sampling.allowed_ids)] = False
    logits[rows] = logits[rows].masked_fill_(is_excluded, -torch.inf)


def _take_out_banned(logits: torch.Tensor, sampling: SamplingInput) -> None:
    if not len(sampling.banned_rows):
        return
    flat = logits.view(-1)
    cells = _cells(logits, sampling.banned_rows, sampling.banned_ids)
    values = flat[cells]
    flat[cells] = -torch.inf
    banned_rows = tensor_of(sampling.banned_rows.astype(np.int64), logits)
    is_empty = (logits.amax(dim=1) == -torch.inf)[banned_rows]
    flat[cells] = torch.where(is_empty, values, -torch.inf)


def _penalise(logits: torch.Tensor, sampling: SamplingInput) -> None:
    """The repetition penalty looks at prompt and output; frequency and presence at the output only."""
    if not len(sampling.history_ids):
        return
    flat = logits.view(-1)
    lens = np.diff(sampling.history_starts)
    rows = np.repeat(np.arange(len(lens)), lens)
    repetition = sampling.repetition_penalties[rows]
    is_penalised = repetition != 1
    # A token that occurs twice is read before it is written, so writing it twice changes it once.
    cells = _cells(logits, rows[is_penalised], sampling.history_ids[is_penalised])
    factors = tensor_of(np.clip(repetition[is_penalised], 1 / LARGEST_PENALTY, LARGEST_PENALTY), logits)
    values = flat[cells]
    penalised = torch.where(values > 0, values / factors, values * factors)
    # An extreme penalty must not make the logit of a token that may be picked infinite.
    penalised.clamp_(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    flat[cells] = torch.where(values == -torch.inf, values, penalised)

    is_output = np.arange(len(rows)) - sampling.history_starts[rows] >= sampling.history_prompt_lens[rows]
    is_output &= (sampling.presence_penalties[rows] != 0) | (sampling.frequency_penalties[rows] != 0)
    keys = rows[is_output] * logits.shape[1] + sampling.history_ids[is_output]
    keys, counts = np.unique(keys, return_counts=True)
    rows = keys // logits.shape[1]
    amounts = sampling.presence_penalties[rows] + sampling.frequency_penalties[rows] * counts
    flat[tensor_of(keys, logits)] -= tensor_of(amounts.astype(np.float32), logits)
