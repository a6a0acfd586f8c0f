"""One step of the engine as flat numpy arrays: the only thing that crosses to the data plane, and to other ranks.

`StepInput` says what to compute, `StepOutput` what came out. Both are immutable by contract: who builds an array hands
it over and never writes to it again. They know no request, no tokenizer and no torch; `pack` alone reads sequences,
to turn the scheduler's `StepPlan` into a `StepInput`.

S sequences take part in a step, T tokens are computed (a decode brings one, a prompt chunk several) and R rows have a
token sampled: one for each sequence that is computed to its end, and one for each candidate of a request where its
prompt is. Sequences that bring exactly one token come first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_lite.engine.sequence import Request, Sequence

Int32Array: TypeAlias = npt.NDArray[np.int32]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]
Float32Array: TypeAlias = npt.NDArray[np.float32]

NO_TOKEN = -1
"""`StepOutput.token_ids` holds this where a row had no finite logit to choose from: that request fails, no other."""
LOWEST_LOGPROB = -9999.0
"""Stands for everything below, minus infinity included, as in vLLM's answers: JSON has no infinities."""


NO_INTS: Int32Array = np.zeros(0, np.int32)
NO_FLOATS: Float32Array = np.zeros(0, np.float32)
START: Int32Array = np.zeros(1, np.int32)
for _constant in (NO_INTS, NO_FLOATS, START):
    _constant.flags.writeable = False


# As default factories of dataclasses: what they give is shared, since nobody writes to it.
def _no_ints() -> Int32Array:
    return NO_INTS


def _no_floats() -> Float32Array:
    return NO_FLOATS


def _start() -> Int32Array:
    return START


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step as Python ints: what an op slices its tensors of maximal size by.

    `num_decodes` sequences bring one token each and come first; `max_query_len` is the most tokens that any sequence
    brings and `max_context_len` the longest context (cached and new tokens together). `num_rows` sampled rows need
    logits.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_context_len: int
    num_rows: int = 0


@dataclass(frozen=True)
class SamplingInput:
    """How each of the R sampled rows picks its token. Arrays of length R unless a shape is given.

    `history_*` serve the penalties: row r has seen `history_ids[history_starts[r]:history_starts[r + 1]]`, of which the
    first `history_prompt_lens[r]` are its prompt; rows without a penalty have an empty history. `bias_*` add to single
    logits, `banned_*` take single tokens out; both are lists of (row, id) pairs of any length. `allowed_*` restrict
    rows: row `allowed_rows[i]` may only pick from `allowed_ids[allowed_starts[i]:allowed_starts[i + 1]]`.
    """

    token_indices: Int32Array
    """Where in the T tokens the row's logits are computed."""
    temperatures: Float32Array
    """0 is greedy."""
    top_ks: Int32Array
    """0 is off."""
    top_ps: Float32Array
    """1 is off."""
    min_ps: Float32Array
    """0 is off."""
    presence_penalties: Float32Array
    frequency_penalties: Float32Array
    repetition_penalties: Float32Array
    seeds: UInt64Array
    positions: Int32Array
    """How many output tokens the sequence has: with the seed, it names the random number that the row uses."""
    history_ids: Int32Array
    history_starts: Int32Array
    """[R + 1]"""
    history_prompt_lens: Int32Array
    bias_rows: Int32Array = field(default_factory=_no_ints)
    bias_ids: Int32Array = field(default_factory=_no_ints)
    bias_values: Float32Array = field(default_factory=_no_floats)
    banned_rows: Int32Array = field(default_factory=_no_ints)
    banned_ids: Int32Array = field(default_factory=_no_ints)
    allowed_rows: Int32Array = field(default_factory=_no_ints)
    allowed_starts: Int32Array = field(default_factory=_start)
    """[len(allowed_rows) + 1]"""
    allowed_ids: Int32Array = field(default_factory=_no_ints)
    logprob_rows: Int32Array = field(default_factory=_no_ints)
    """Rows whose token's logprob is wanted, together with as many of the best tokens as `num_logprobs` says."""
    num_logprobs: Int32Array = field(default_factory=_no_ints)
    beam_rows: Int32Array = field(default_factory=_no_ints)
    """Rows that go on in several ways: as many of the best next tokens are wanted as `num_continuations` says."""
    num_continuations: Int32Array = field(default_factory=_no_ints)

    @property
    def num_rows(self) -> int:
        """R, how many tokens are sampled."""
        return len(self.token_indices)


@dataclass(frozen=True)
class ScoringInput:
    """Tokens of prompts whose logprobs are wanted, after the tokens before them."""

    token_indices: Int32Array = field(default_factory=_no_ints)
    """Where in the T tokens the one before it is."""
    token_ids: Int32Array = field(default_factory=_no_ints)
    num_logprobs: Int32Array = field(default_factory=_no_ints)
    """How many of the best tokens in its place are wanted too."""


NO_SCORING = ScoringInput()


def _no_scoring() -> ScoringInput:
    return NO_SCORING


@dataclass(frozen=True)
class StepInput:
    """What one step computes.

    A slot is `block_id * block_size + offset`. The copies of blocks (copy-on-write) come before anything is written.
    """

    shape: StepShape
    token_ids: Int32Array
    """[T]"""
    positions: Int32Array
    """[T], in tokens from the start of each sequence."""
    slot_mapping: Int32Array
    """[T], where each token's key and value go."""
    query_starts: Int32Array
    """[S + 1], sequence s brings tokens `query_starts[s]:query_starts[s + 1]`."""
    context_lens: Int32Array
    """[S], tokens in the cache once this step has written its own."""
    block_tables: Int32Array
    """[S, max blocks of any sequence in the step], padded with 0."""
    copy_sources: Int32Array
    """[C], block ids."""
    copy_destinations: Int32Array
    """[C], block ids."""
    sampling: SamplingInput
    scoring: ScoringInput = field(default_factory=_no_scoring)


@dataclass(frozen=True)
class Logprobs:
    """The model's logprobs of N tokens and of the best tokens in their places, before any field of a request changes
    them.
    """

    of_tokens: Float32Array
    """[N]"""
    top_ids: Int32Array
    """[N, most that any of them wants], the best first, lower ids first in a tie."""
    top_logprobs: Float32Array
    """[N, the same]"""


@dataclass(frozen=True)
class Continuations:
    """The best next tokens of N beams, as far as their requests allow them."""

    token_ids: Int32Array
    """[N, most that any of them wants], the best first, lower ids first in a tie."""
    logprobs: Float32Array
    """[N, the same]: the token's logit, as the request's fields have changed it, over the model's own total; minus
    infinity where the token may not be picked."""


NO_LOGPROBS = Logprobs(NO_FLOATS, NO_INTS.reshape(0, 0), NO_FLOATS.reshape(0, 0))
NO_CONTINUATIONS = Continuations(NO_INTS.reshape(0, 0), NO_FLOATS.reshape(0, 0))


def _no_logprobs() -> Logprobs:
    return NO_LOGPROBS


def _no_continuations() -> Continuations:
    return NO_CONTINUATIONS


@dataclass(frozen=True)
class StepOutput:
    """What came of the R sampled rows and of the scored tokens, each in the order of the input."""

    token_ids: Int32Array
    """[R]"""
    logprobs: Logprobs = field(default_factory=_no_logprobs)
    """Of the tokens of `SamplingInput.logprob_rows`."""
    continuations: Continuations = field(default_factory=_no_continuations)
    """Of `SamplingInput.beam_rows`."""
    scores: Logprobs = field(default_factory=_no_logprobs)
    """Of the tokens of `ScoringInput`."""


class ScheduledSequence(NamedTuple):
    """A sequence's part in a step: it brings its next `num_tokens` tokens that are not computed yet."""

    request: Request
    sequence: Sequence
    num_tokens: int
    copies: AbstractSequence[tuple[int, int]]
    """(source, destination) blocks of its copy-on-write."""

    sampled: AbstractSequence[Sequence]
    """The sequences whose next token is picked, all after this one's last token.

    Only the end of what is known has a next token; that of a prompt has one for each candidate.
    """
    scored: range
    """Positions of the prompt's tokens whose logprobs come out of this step."""


def scheduled_sequence(
    request: Request, sequence: Sequence, num_tokens: int, copies: AbstractSequence[tuple[int, int]]
) -> ScheduledSequence:
    """What the next `num_tokens` tokens of a sequence lead to."""
    is_end = num_tokens == sequence.num_uncomputed_tokens
    scored = range(0)
    if request.prompt_logprobs is not None:
        first, end = sequence.num_computed_tokens + 1, sequence.num_computed_tokens + num_tokens + 1
        scored = range(max(first, len(request.prompt_logprobs)), min(end, sequence.num_prompt_tokens))
    sampled = (sequence, *request.unstarted) if is_end else ()
    return ScheduledSequence(request, sequence, num_tokens, copies, sampled, scored)


@dataclass(frozen=True)
class StepPlan:
    """What the scheduler chose for one step; those that bring exactly one token come first."""

    block_size: int
    scheduled: list[ScheduledSequence]


def pack(plan: StepPlan) -> StepInput:
    """Lays a plan with at least one sequence out in flat arrays, all of them new."""
    sequences = [scheduled.sequence for scheduled in plan.scheduled]
    sampled = [scheduled.sampled for scheduled in plan.scheduled]
    num_seqs = len(sequences)
    num_new = _int32((scheduled.num_tokens for scheduled in plan.scheduled), num_seqs)
    num_computed = _int32((sequence.num_computed_tokens for sequence in sequences), num_seqs)
    query_starts = _starts(num_new)
    num_tokens = int(query_starts[-1])
    token_ids = array("i")
    for sequence, start, end in zip(sequences, num_computed.tolist(), (num_computed + num_new).tolist()):
        token_ids.extend(sequence.token_ids[start:end])
    sequence_of_token = np.repeat(np.arange(num_seqs, dtype=np.int32), num_new)
    positions = np.arange(num_tokens, dtype=np.int32) + (num_computed - query_starts[:-1])[sequence_of_token]
    block_tables = _block_tables(sequences)
    block_ids = block_tables[sequence_of_token, positions // plan.block_size]
    context_lens = num_computed + num_new
    copies = np.array([copy for scheduled in plan.scheduled for copy in scheduled.copies], np.int32).reshape(-1, 2)
    rows = [sequence for rows_of_one in sampled for sequence in rows_of_one]
    return StepInput(
        shape=StepShape(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_decodes=int(np.count_nonzero(num_new == 1)),
            max_query_len=int(num_new.max()),
            max_context_len=int(context_lens.max()),
            num_rows=len(rows),
        ),
        token_ids=np.frombuffer(token_ids, np.int32),
        positions=positions,
        slot_mapping=block_ids * plan.block_size + positions % plan.block_size,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        copy_sources=np.ascontiguousarray(copies[:, 0]),
        copy_destinations=np.ascontiguousarray(copies[:, 1]),
        sampling=_pack_sampling(rows, np.repeat(query_starts[1:] - 1, _lengths(sampled))),
        scoring=_pack_scoring(plan, query_starts) if any(one.scored for one in plan.scheduled) else NO_SCORING,
    )


def _pack_scoring(plan: StepPlan, query_starts: Int32Array) -> ScoringInput:
    scored = [
        (int(start) + position - 1 - scheduled.sequence.num_computed_tokens, scheduled, position)
        for start, scheduled in zip(query_starts, plan.scheduled)
        for position in scheduled.scored
    ]
    return ScoringInput(
        token_indices=np.array([index for index, _, _ in scored], np.int32),
        token_ids=np.array([scheduled.sequence.token_ids[position] for _, scheduled, position in scored], np.int32),
        num_logprobs=np.array([scheduled.request.params.prompt_logprobs for _, scheduled, _ in scored], np.int32),
    )


def _pack_sampling(rows: list[Sequence], token_indices: Int32Array) -> SamplingInput:
    num_rows = len(rows)
    rules = [sequence.rules for sequence in rows]
    numbers = np.array([rule.sampling_row for rule in rules], np.float32).reshape(num_rows, 6).T.copy()
    histories = [sequence.token_ids if sequence.rules.needs_history else _NO_IDS for sequence in rows]
    return SamplingInput(
        token_indices=token_indices,
        temperatures=numbers[0],
        top_ks=_int32((rule.top_k for rule in rules), num_rows),
        top_ps=numbers[1],
        min_ps=numbers[2],
        presence_penalties=numbers[3],
        frequency_penalties=numbers[4],
        repetition_penalties=numbers[5],
        seeds=np.fromiter((sequence.seed for sequence in rows), np.uint64, num_rows),
        positions=_int32((sequence.num_output_tokens for sequence in rows), num_rows),
        history_ids=_joined(histories),
        history_starts=_starts(_lengths(histories)),
        history_prompt_lens=_int32(
            (sequence.num_prompt_tokens if sequence.rules.needs_history else 0 for sequence in rows), num_rows
        ),
        **_pack_lists(rows),
    )


def _pack_lists(rows: list[Sequence]) -> dict[str, Any]:
    """The fields of any length, but for those that would be empty: few requests have any."""
    rules = [sequence.rules for sequence in rows]
    fields: dict[str, Any] = {}
    if any(rule.bias_ids for rule in rules):
        fields["bias_rows"], fields["bias_ids"] = _pairs([rule.bias_ids for rule in rules])
        fields["bias_values"] = np.array([value for rule in rules for value in rule.bias_values], np.float32)
    banned = [sequence.rules.currently_banned_ids(sequence.token_ids, sequence.num_output_tokens) for sequence in rows]
    if any(banned):
        fields["banned_rows"], fields["banned_ids"] = _pairs(banned)
    allowed = [(row, rule.allowed_ids) for row, rule in enumerate(rules) if rule.allowed_ids is not None]
    if allowed:
        fields["allowed_rows"] = np.array([row for row, _ in allowed], np.int32)
        fields["allowed_starts"] = _starts(_lengths([ids for _, ids in allowed]))
        fields["allowed_ids"] = _joined([ids for _, ids in allowed])
    logprobs = [(row, rule.num_logprobs) for row, rule in enumerate(rules) if rule.num_logprobs is not None]
    if logprobs:
        fields["logprob_rows"], fields["num_logprobs"] = np.array(logprobs, np.int32).T.copy()
    beams = [(row, rule.num_continuations) for row, rule in enumerate(rules) if rule.num_continuations]
    if beams:
        fields["beam_rows"], fields["num_continuations"] = np.array(beams, np.int32).T.copy()
    return fields


_NO_IDS = array("i")


def _block_tables(sequences: list[Sequence]) -> Int32Array:
    """[S, most blocks of any sequence], padded with 0."""
    lengths = [len(sequence.blocks.block_ids) for sequence in sequences]
    block_tables = np.zeros((len(sequences), max(lengths)), np.int32)
    for row, length, sequence in zip(block_tables, lengths, sequences):
        row[:length] = sequence.blocks.block_ids
    return block_tables


def _int32(values: Iterable[int], length: int) -> Int32Array:
    return np.fromiter(values, np.int32, length)


def _lengths(lists: AbstractSequence[AbstractSequence[Any]]) -> Int32Array:
    return _int32(map(len, lists), len(lists))


def _starts(lengths: Int32Array) -> Int32Array:
    """Where each of several consecutive lists begins, and behind them where the last one ends: [len(lengths) + 1]."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _joined(lists: AbstractSequence[array[int]]) -> Int32Array:
    ids = array("i")
    for more in lists:
        ids.extend(more)
    return np.frombuffer(ids, np.int32) if ids else np.zeros(0, np.int32)


def _pairs(lists: AbstractSequence[array[int]]) -> tuple[Int32Array, Int32Array]:
    """The (row, id) pairs of one list of ids a row."""
    return np.repeat(np.arange(len(lists), dtype=np.int32), _lengths(lists)), _joined(lists)
