"""Ordinary GPT-2 checkpoints whose output is known exactly: a given list of ids, or the same logits at every step.

Attention and MLP write nothing. The best logit leads by 16, so no dtype changes the output. A script knows its position
and nothing of the tokens before it, nor of the KV cache: no model for tests of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HIDDEN_SIZE = 320
"""Five heads of 64; at least the vocabulary, since a token is a dimension."""
LEAD = 10.0


def script_model(
    ids: Sequence[int], prompt_len: int, vocab_size: int, *, num_positions: int = 256, rest: int = 0
) -> GPT2LMHeadModel:
    """After a prompt of `prompt_len` tokens the greedy output is `ids`; `rest` comes everywhere else."""
    model = _blank(vocab_size, num_positions)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(1.0)
        for position in range(num_positions):
            step = position - (prompt_len - 1)
            model.transformer.wpe.weight[position, ids[step] if 0 <= step < len(ids) else rest] = LEAD
    return model


def const_model(
    logits: Mapping[int, float], vocab_size: int, *, num_positions: int = 256, other: float = -30.0
) -> GPT2LMHeadModel:
    """Every step has these logits by id, and `other` for all other ids."""
    model = _blank(vocab_size, num_positions)
    with torch.no_grad():
        model.transformer.ln_f.bias[:vocab_size] = other
        for token_id, logit in logits.items():
            model.transformer.ln_f.bias[token_id] = logit
    return model


def save_scripted(
    folder: Path,
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    eos_token_id: int | list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Saves both; `eos_token_id` goes to generation_config.json."""
    if eos_token_id is not None:
        model.generation_config.eos_token_id = eos_token_id
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _blank(vocab_size: int, num_positions: int) -> GPT2LMHeadModel:
    """Hidden states are what the embedding says, an identity; the last norm gives nothing."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=num_positions,
        n_embd=HIDDEN_SIZE,
        n_layer=1,
        n_head=5,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith(("ln_1.weight", "ln_2.weight")) else 0.0)
        model.transformer.wte.weight[:, :vocab_size] = torch.eye(vocab_size)
    return model
