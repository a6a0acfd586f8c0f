"""Picks each row's token as requests ask. Knows their parameters and random numbers, no request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vllm_lite.engine.step import (
    NO_CONTINUATIONS,
    NO_LOGPROBS,
    NO_TOKEN,
    Int32Array,
    SamplingInput,
    StepOutput,
    StepShape,
)
from vllm_lite.ops import sample as op
from vllm_lite.ops.workspace import Workspace
from vllm_lite.sampling_params import GREEDY_BELOW
from vllm_lite.worker.logits_processing import changes_logits, process_logits
from vllm_lite.worker.logprobs import best_continuations, token_logprobs
from vllm_lite.worker.random_numbers import uniforms
from vllm_lite.worker.transfer import to_device


def is_plain_greedy(sampling: SamplingInput) -> bool:
    """Whether every row takes the token with the largest logit of the model, unchanged, and nothing else is wanted."""
    wants_more = len(sampling.logprob_rows) or len(sampling.beam_rows)
    return not wants_more and not changes_logits(sampling) and bool(np.all(_is_greedy(sampling)))


def sample(workspace: Workspace, shape: StepShape, logits: torch.Tensor, sampling: SamplingInput) -> StepOutput:
    """One token id a row, NO_TOKEN for a row whose logits hold a NaN, +inf or no finite value; and what else is wanted.

    logits [R, vocab_size] float32, contiguous, R = shape.num_rows; they are changed. On a GPU the host waits for
    nothing but the results, each by itself, except where top_k or top_p are in use.
    """
    unchanged = _rows_of(logits, sampling.logprob_rows)
    if len(sampling.beam_rows):
        _normalise(logits, sampling.beam_rows)
    is_healthy: torch.Tensor | None = None
    if changes_logits(sampling):
        # A change may hide what is wrong with a row.
        is_healthy = logits.amax(dim=1).isfinite()
        process_logits(logits, sampling)
    continuations = NO_CONTINUATIONS
    if len(sampling.beam_rows):
        num_best = int(sampling.num_continuations.max())
        continuations = best_continuations(_rows_of(logits, sampling.beam_rows), num_best)
    token_ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    op.sample(workspace, shape, logits, _parameters(sampling, logits.shape[1]), token_ids)
    if is_healthy is not None:
        token_ids.masked_fill_(~is_healthy, NO_TOKEN)
    picked: Int32Array = token_ids.cpu().numpy()
    logprobs = NO_LOGPROBS
    if len(sampling.logprob_rows):
        logprobs = token_logprobs(unchanged, picked[sampling.logprob_rows], int(sampling.num_logprobs.max()))
    return StepOutput(picked, logprobs, continuations)


def _normalise(logits: torch.Tensor, rows: Int32Array) -> None:
    """Makes logprobs of some rows: a beam search changes those, as Hugging Face does. Makes no copy of all logits."""
    totals = torch.zeros(len(logits), 1, device=logits.device)
    indices = to_device(rows.astype(np.int64), logits.device)
    totals[indices] = logits.logsumexp(dim=1, keepdim=True)[indices]
    logits.sub_(totals)


def _rows_of(logits: torch.Tensor, rows: Int32Array) -> torch.Tensor:
    """A copy."""
    if not len(rows):
        return logits[:0]
    return logits[to_device(rows.astype(np.int64), logits.device)]


def _is_greedy(sampling: SamplingInput) -> npt.NDArray[np.bool_]:
    is_greedy: npt.NDArray[np.bool_] = (sampling.temperatures < GREEDY_BELOW) | (sampling.top_ks == 1)
    return is_greedy


def _parameters(sampling: SamplingInput, vocab_size: int) -> op.SamplingParameters:
    # A top_k that keeps everything is off.
    top_ks = np.where(sampling.top_ks < vocab_size, np.maximum(sampling.top_ks, 0), 0)
    return op.SamplingParameters(
        temperatures=torch.tensor(np.maximum(sampling.temperatures, np.float32(GREEDY_BELOW))),
        top_ks=torch.tensor(np.where(_is_greedy(sampling), 1, top_ks).astype(np.int32)),
        top_ps=torch.tensor(sampling.top_ps),
        min_ps=torch.tensor(sampling.min_ps),
        uniforms=torch.tensor(uniforms(sampling.seeds, sampling.positions)),
    )
