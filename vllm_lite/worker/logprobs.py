"""Logprobs: logits less the logarithm of the sum of their exponentials. Knows no request."""

from __future__ import annotations

import numpy as np
import torch

from vllm_lite.engine.step import LOWEST_LOGPROB, Continuations, Int32Array, Logprobs
from vllm_lite.worker.transfer import to_device


def token_logprobs(logits: torch.Tensor, token_ids: Int32Array, num_top: int) -> Logprobs:
    """Of one token a row, and of the `num_top` best of the row, as far as the vocabulary has so many.

    logits [N, vocab_size] float32, as the model made them; an id of -1 stands for any.
    """
    totals = logits.logsumexp(dim=1, keepdim=True)
    ids = to_device(np.maximum(token_ids, 0).astype(np.int64), logits.device).unsqueeze(1)
    of_tokens = (logits.gather(1, ids) - totals).clamp_(min=LOWEST_LOGPROB)
    values, top_ids = _best(logits, num_top)
    return Logprobs(
        of_tokens.squeeze(1).cpu().numpy(),
        top_ids.int().cpu().numpy(),
        (values - totals).clamp_(min=LOWEST_LOGPROB).cpu().numpy(),
    )


def best_continuations(logprobs: torch.Tensor, num_best: int) -> Continuations:
    """The `num_best` best tokens of each row, as far as the vocabulary has so many.

    logprobs [N, vocab_size] float32, as the requests have changed them.
    """
    values, ids = _best(logprobs, num_best)
    return Continuations(ids.int().cpu().numpy(), values.cpu().numpy())


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids, both [N, at most count], the best first, lower ids first in a tie among them."""
    values, ids = logits.topk(min(count, logits.shape[1]), dim=1)
    ids, order = ids.sort(dim=1)
    values, best_first = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, best_first)
