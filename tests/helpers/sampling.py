"""Builds a `SamplingInput` from what differs from plain greedy rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_lite.engine.step import SamplingInput


@dataclass
class Row:
    """How one row picks its token; the defaults sample from the plain distribution."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    allowed: Sequence[int] | None = None
    num_logprobs: int | None = None
    num_continuations: int = 0


GREEDY = Row(temperature=0.0)


def sampling_input(rows: Sequence[Row], token_indices: Sequence[int] | None = None) -> SamplingInput:
    """Token indices default to 0, 1, 2 ... as in a step of decodes."""

    def int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array(values, np.int32)

    def float32(name: str) -> npt.NDArray[np.float32]:
        return np.array([getattr(row, name) for row in rows], np.float32)

    def starts(lens: Sequence[int]) -> npt.NDArray[np.int32]:
        return int32([0, *np.cumsum(lens, dtype=np.int64)])

    histories = [[*row.prompt, *row.output] for row in rows]
    allowed = [(r, row.allowed) for r, row in enumerate(rows) if row.allowed is not None]
    return SamplingInput(
        token_indices=int32(range(len(rows)) if token_indices is None else token_indices),
        temperatures=float32("temperature"),
        top_ks=int32([row.top_k for row in rows]),
        top_ps=float32("top_p"),
        min_ps=float32("min_p"),
        presence_penalties=float32("presence_penalty"),
        frequency_penalties=float32("frequency_penalty"),
        repetition_penalties=float32("repetition_penalty"),
        seeds=np.array([row.seed for row in rows], np.uint64),
        positions=int32([row.position for row in rows]),
        history_ids=int32([token for history in histories for token in history]),
        history_starts=starts([len(history) for history in histories]),
        history_prompt_lens=int32([len(row.prompt) for row in rows]),
        bias_rows=int32([r for r, row in enumerate(rows) for _ in row.bias]),
        bias_ids=int32([token for row in rows for token in row.bias]),
        bias_values=np.array([value for row in rows for value in row.bias.values()], np.float32),
        banned_rows=int32([r for r, row in enumerate(rows) for _ in row.banned]),
        banned_ids=int32([token for row in rows for token in row.banned]),
        allowed_rows=int32([r for r, _ in allowed]),
        allowed_starts=starts([len(ids) for _, ids in allowed]),
        allowed_ids=int32([token for _, ids in allowed for token in ids]),
        logprob_rows=int32([r for r, row in enumerate(rows) if row.num_logprobs is not None]),
        num_logprobs=int32([row.num_logprobs for row in rows if row.num_logprobs is not None]),
        beam_rows=int32([r for r, row in enumerate(rows) if row.num_continuations]),
        num_continuations=int32([row.num_continuations for row in rows if row.num_continuations]),
    )
