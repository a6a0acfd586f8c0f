"""Picks each row's token from its logits.

A row's token depends on its own logits and parameters, never on the other rows. A token's mass is exp((logit - largest
logit) / temperature) in float64. Where top_k and top_p are off, the uniform number picks from the cumulative masses in
the order of ids; otherwise from those of the best tokens, best first, lower ids first in a tie.

The CPU kernel sums in another order, in float64 too: it picks the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_lite.engine.step import NO_TOKEN, StepShape
from vllm_lite.kernels.cpu import SCRATCH_BYTES
from vllm_lite.ops.workspace import Workspace

NUM_FIRST_CANDIDATES = 64
CANDIDATE_GROWTH = 8
MAX_LOGITS_AT_A_TIME = 2**18
"""Sampled rows are handled a few at a time, so that their masses, sums and sort keys stay in the cache."""
MAX_LOGITS_AT_A_TIME_ON_GPU = 2**23
"""There, so that they take some hundred MB."""
KERNEL_BYTES_PER_TOKEN, KERNEL_BYTES = 9, 2**17
"""Of scratch memory that the kernel needs: for each token of the vocabulary, and besides."""


@dataclass(frozen=True)
class SamplingParameters:
    """How each row picks its token: tensors [num_rows] in host memory."""

    temperatures: torch.Tensor
    """float32, not 0."""
    top_ks: torch.Tensor
    """int32: 0 is off, 1 takes the largest logit, the lower id in a tie; less than the vocabulary's size."""
    top_ps: torch.Tensor
    """float32: 1 is off. Of what top_k leaves."""
    min_ps: torch.Tensor
    """float32: 0 is off. Relative to the best token's mass."""
    uniforms: torch.Tensor
    """float64 in [0, 1): where in the kept tokens' mass the picked one lies."""


def sample(
    workspace: Workspace, shape: StepShape, logits: torch.Tensor, parameters: SamplingParameters, out: torch.Tensor
) -> None:
    """out[r] = the id that row r picks; NO_TOKEN where its largest logit is not finite, or one is NaN.

    logits [max_rows, vocab_size] float32, which may be changed; out [max_rows] int32, beside the logits.
    """
    vocab_size = logits.shape[1]
    if workspace.cpu is not None and KERNEL_BYTES_PER_TOKEN * vocab_size + KERNEL_BYTES <= SCRATCH_BYTES:
        p = parameters
        columns = (p.temperatures, p.top_ks, p.top_ps, p.min_ps, p.uniforms)
        workspace.cpu.call("sample", shape, logits, logits.stride(0), vocab_size, *columns, out)
        return
    _sample(logits[: shape.num_rows], parameters, out[: shape.num_rows])


@dataclass(frozen=True)
class _Rows:
    """Parameters of some rows as columns [N, 1]; `scaled` [N, vocab_size] are logits over temperature, at most 0."""

    scaled: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    uniforms: torch.Tensor


def _sample(logits: torch.Tensor, parameters: SamplingParameters, out: torch.Tensor) -> None:
    """The reference. Rows are handled together by kind."""
    is_healthy = logits.amax(dim=1).isfinite()
    if not (_can_be_asked(is_healthy) and is_healthy.all()):
        logits.masked_fill_(~is_healthy.unsqueeze(1), 0.0)  # so that no picking goes astray
    is_greedy = (parameters.top_ks == 1).numpy()
    is_restricted = ((parameters.top_ks > 0) | (parameters.top_ps < 1)).numpy()
    greedy, restricted, free = (
        torch.from_numpy(np.flatnonzero(kind)) for kind in (is_greedy, ~is_greedy & is_restricted, ~is_restricted)
    )
    if len(greedy):
        out[_on_device(greedy, out)] = _select(logits, greedy).argmax(dim=1).int()
    most_logits = MAX_LOGITS_AT_A_TIME if logits.is_cpu else MAX_LOGITS_AT_A_TIME_ON_GPU
    num_rows = max(1, most_logits // logits.shape[1])
    for pick, kind in ((_pick_by_id, free), (_pick_candidate, restricted)):
        for part in torch.split(kind, num_rows) if len(kind) else ():
            out[_on_device(part, out)] = pick(_rows(logits, parameters, part)).int()
    out.masked_fill_(~is_healthy, NO_TOKEN)


def _can_be_asked(tensor: torch.Tensor) -> bool:
    """Whether a look at its values costs nothing."""
    return tensor.is_cpu


def _select(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[_on_device(rows, logits)]


def _on_device(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else values


def _rows(logits: torch.Tensor, parameters: SamplingParameters, rows: torch.Tensor) -> _Rows:
    def column(values: torch.Tensor) -> torch.Tensor:
        return _on_device(values[rows], logits).unsqueeze(1)

    selected = _select(logits, rows)
    # The maximum becomes 0 first: then no temperature can make a logit overflow to +inf.
    scaled = (selected - selected.amax(dim=1, keepdim=True)).div_(column(parameters.temperatures))
    return _Rows(
        scaled=scaled,
        top_ks=column(parameters.top_ks),
        top_ps=column(parameters.top_ps).double(),
        min_ps=column(parameters.min_ps).double(),
        uniforms=column(parameters.uniforms),
    )


def _pick_by_id(rows: _Rows) -> torch.Tensor:
    """[N] ids."""
    masses = rows.scaled.double().exp_()
    return _invert(masses.masked_fill_(masses < rows.min_ps, 0.0), rows.uniforms)


def _pick_candidate(rows: _Rows) -> torch.Tensor:
    """[N] ids. The candidates grow until they hold everything that top_k and top_p can keep of every row."""
    vocab_size = rows.scaled.shape[1]
    all_masses = rows.scaled.double().exp_()
    totals = all_masses.sum(dim=1, keepdim=True)
    keys = _sort_keys(rows.scaled)
    token_ids = torch.empty(len(keys), dtype=torch.int64, device=keys.device)
    pending = torch.arange(len(keys), device=keys.device)
    num_candidates = min(NUM_FIRST_CANDIDATES, vocab_size)
    while len(pending):
        ids = vocab_size - 1 - (_largest(keys[pending], num_candidates) & 0xFFFFFFFF)
        masses = all_masses[pending].gather(1, ids)
        top_ks, min_ps = rows.top_ks[pending], rows.min_ps[pending]
        ranks = torch.arange(num_candidates, device=keys.device)
        masses.masked_fill_((top_ks > 0) & (ranks >= top_ks), 0.0)
        sums = masses.cumsum(dim=1)
        limits = rows.top_ps[pending] * torch.where(top_ks > 0, sums[:, -1:], totals[pending])
        is_complete = torch.where(top_ks > 0, top_ks <= num_candidates, sums[:, -1:] >= limits).squeeze(1)
        if num_candidates == vocab_size:
            is_complete.fill_(True)
        masses.masked_fill_(((sums - masses >= limits) | (masses < min_ps * masses[:, :1])) & (ranks > 0), 0.0)
        ranks_picked = _invert(masses, rows.uniforms[pending]).unsqueeze(1)
        token_ids[pending[is_complete]] = ids.gather(1, ranks_picked).squeeze(1)[is_complete]
        pending = pending[~is_complete]
        num_candidates = min(num_candidates * CANDIDATE_GROWTH, vocab_size)
    return token_ids


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """[N, count], the largest first."""
    if keys.is_cpu:
        # numpy's partial sort is vectorised, torch's is not: 0.1 against 0.5 ms for 4,096 keys out of 49,152.
        best = np.partition(keys.numpy(), -count, axis=1)[:, -count:]
        best.sort(axis=1)
        return torch.from_numpy(best[:, ::-1].copy())
    return keys.topk(count, dim=1).values


def _sort_keys(values: torch.Tensor) -> torch.Tensor:
    """[N, vocab_size] int64 that sort like the values and, among equal values, the lower id as the larger one.

    The low 32 bits hold the id, counted from the last one.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 the same
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids_from_last = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (ordered.long() << 32) + ids_from_last


def _invert(masses: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[N] where the cumulative sum of a row's masses [N, K] passes the share `uniforms` [N, 1] of their total."""
    sums = masses.cumsum(dim=1)
    totals = sums[:, -1:]
    # Below the total: a mass of 0 is never picked.
    thresholds = torch.minimum(uniforms * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(sums, thresholds, right=True).squeeze(1)
