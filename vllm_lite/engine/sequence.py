"""A request and its sequences: token ids, block table, how far they are computed, and when they end. Knows no queue."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace

from vllm_lite.engine.block_manager import BlockTable
from vllm_lite.engine.detokenizer import Detokenizer, UndecodableError
from vllm_lite.engine.generation_rules import GenerationRules
from vllm_lite.outputs import CompletionDelta, FinishReason, Outcome, RequestTally
from vllm_lite.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted one is WAITING again; FINISHED also means failed or aborted."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One candidate of a request: its prompt and the output so far, in one array of ids.

    The last token of a sequence that decodes has no K/V yet: `num_computed_tokens` is one less than `num_tokens`.
    """

    __slots__ = (
        "blocks",
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "index",
        "num_computed_tokens",
        "num_prompt_tokens",
        "rules",
        "seed",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        prompt_token_ids: AbstractSequence[int],
        rules: GenerationRules,
        detokenizer: Detokenizer,
        seed: int = 0,
    ) -> None:
        """`seed` is a uint64."""
        self.index = index
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.blocks = BlockTable()
        self.rules = rules
        self.detokenizer = detokenizer
        self.seed = seed
        self.cumulative_logprob = 0.0
        """Of the output, where logprobs are computed."""
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V are not in the cache: 1 while decoding, more for a prompt or after a preemption."""
        return len(self.token_ids) - self.num_computed_tokens

    def fork(self, index: int) -> Sequence:
        """Another one that has come as far and goes its own way from here; it owns no blocks yet."""
        other = Sequence(index, self.token_ids, self.rules, self.detokenizer.fork(), self.seed)
        other.num_prompt_tokens = self.num_prompt_tokens
        other.num_computed_tokens = self.num_computed_tokens
        other.cumulative_logprob = self.cumulative_logprob
        return other

    def append(
        self, token_id: int, logprob: float | None = None, top_logprobs: Mapping[int, float] | None = None
    ) -> CompletionDelta:
        """Takes the next token, decides whether it ends the sequence, and returns what the caller gets to see.

        Its logprob and those of the best tokens in its place are known where the rules ask for them.
        """
        delta = self._append(token_id)
        if logprob is None:
            return delta
        self.cumulative_logprob += logprob
        return replace(
            delta,
            cumulative_logprob=self.cumulative_logprob,
            score=self.cumulative_logprob,
            logprobs=({token_id: logprob, **(top_logprobs or {})},) if self.rules.shows_logprobs else None,
        )

    def _append(self, token_id: int) -> CompletionDelta:
        self.token_ids.append(token_id)
        rules, num_tokens = self.rules, len(self.token_ids)
        may_stop = num_tokens - self.num_prompt_tokens >= rules.min_tokens
        if may_stop and token_id in rules.eos_ids:
            return self._finish("stop", None, token_id, self.detokenizer.finish())
        if may_stop and token_id in rules.stop_ids:
            return self._finish("stop", token_id, token_id, self.detokenizer.finish_at(token_id))
        text, stop = self.detokenizer.append(token_id, check_stop=may_stop)
        if stop is not None:
            return self._finish("stop", stop, token_id, text)
        if num_tokens >= rules.max_sequence_len:
            return self._finish("length", None, token_id, text + self.detokenizer.finish())
        return CompletionDelta(self.index, text, (token_id,))

    def abort(self) -> CompletionDelta:
        """Ends the sequence where it is; the text held back comes out, unless it cannot be decoded."""
        self.finish_reason = "abort"
        try:
            held_back = self.detokenizer.finish()
        except UndecodableError:  # half a character, of a request that nobody waits for
            held_back = ""
        has_logprobs = self.rules.num_logprobs is not None or self.rules.num_continuations > 0
        return CompletionDelta(
            self.index,
            held_back,
            (),
            "abort",
            cumulative_logprob=self.cumulative_logprob if has_logprobs else None,
            logprobs=() if self.rules.shows_logprobs else None,
            score=self.cumulative_logprob,
        )

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, token_id: int, text: str) -> CompletionDelta:
        self.finish_reason = reason
        return CompletionDelta(self.index, text, (token_id,), reason, stop_reason)


class Request:
    """A caller's request: a group of sequences that are admitted, preempted and freed together.

    One sequence computes the prompt. At its end the other candidates come out of it, and share its blocks.
    """

    __slots__ = (
        "admission_time_s",
        "arrival_time_s",
        "first_token_time_s",
        "is_aborted",
        "last_token_time_s",
        "num_generated_tokens",
        "outcome",
        "params",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "queued_time_s",
        "request_id",
        "sequences",
        "status",
        "unstarted",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: AbstractSequence[int],
        params: SamplingParams,
        sequences: list[Sequence],
    ) -> None:
        """`sequences` are all candidates; in beam search, the one that all beams come out of."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sequences = sequences[:1]
        self.unstarted = sequences[1:]
        """Candidates that begin once the prompt has been computed."""
        self.prompt_logprobs: list[dict[int, float] | None] | None = None if params.prompt_logprobs is None else [None]
        """Of the prompt's tokens, as far as they are known; the first has none."""
        self.status = RequestStatus.WAITING
        self.arrival_time_s = 0.0
        """When its caller brought it, in seconds of the monotonic clock like the next four; set once it is queued."""
        self.queued_time_s = 0.0
        """When it was queued, with its prompt tokenised."""
        self.admission_time_s: float | None = None
        """When it first left the queue."""
        self.first_token_time_s: float | None = None
        self.last_token_time_s = 0.0
        """When the last step that brought it tokens ended."""
        self.num_generated_tokens = 0
        """Of all candidates and beams, those that have ended included."""
        self.outcome: Outcome | None = None
        """How it was counted at its end."""
        self.is_aborted = False
        """Set while a step is in flight: the request must not be touched before the step's end."""

    @property
    def tally(self) -> RequestTally:
        """What was counted of it. To be asked for once it has ended."""
        assert self.outcome is not None, "a request that goes on has no outcome"
        num_prompt_tokens = len(self.prompt_token_ids) if self.num_generated_tokens else 0
        return RequestTally(
            self.outcome,
            num_prompt_tokens,
            self.num_generated_tokens,
            self.admission_time_s,
            self.first_token_time_s,
        )

    @property
    def unfinished_sequences(self) -> list[Sequence]:
        """The sequences that still generate."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        """Whether no sequence generates any more."""
        return not self.unstarted and all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_slots(self) -> int:
        """How many sequences it may run at a time from now on."""
        if self.params.use_beam_search:
            return self.params.num_candidates
        return len(self.unfinished_sequences) + len(self.unstarted)
