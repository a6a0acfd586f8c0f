"""The state machine of the engine: add, abort, begin_step, finish_step. Knows no thread, no event loop and no model.

A step has two halves, so that whoever computes it can do so elsewhere: `begin_step` hands out arrays, `finish_step`
takes the tokens. In between requests may be added and aborted, because nothing that the step uses is touched: an abort
only marks its request, and the end of the step frees it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from vllm_lite.engine.beam_search import BeamRules
from vllm_lite.engine.beams import Beams
from vllm_lite.engine.block_manager import BlockManager
from vllm_lite.engine.detokenizer import Detokenizer, UndecodableError
from vllm_lite.engine.generation_rules import (
    GenerationRules,
    candidate_seed,
    check_unicode,
    make_rules,
    max_sequence_len,
)
from vllm_lite.engine.scheduler import Scheduler
from vllm_lite.engine.sequence import Request, RequestStatus
from vllm_lite.engine.sequence import Sequence as GeneratedSequence
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.statistics import EngineStats, RequestCounts, StepClock
from vllm_lite.engine.step import NO_TOKEN, StepInput, StepOutput, StepPlan, pack
from vllm_lite.engine.step_results import RowResult, ScoredToken, sampled_rows, scored_tokens
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.errors import RequestError, RequestFailedError
from vllm_lite.outputs import CompletionDelta, RequestDelta
from vllm_lite.sampling_params import SamplingParams

MAX_BYTES_PER_TOKEN = 64
"""Of a prompt on average: far above that of any real text."""
MIN_PROMPT_BYTES = 64 * 1024
"""Every prompt of this size is tokenised, however small the context."""
MAX_QUICK_SIZE = 1024
"""Characters, which take 0.3 ms to tokenise, and 3 ms where each is several tokens, or ids."""
MAX_QUICK_CANDIDATES = 8
NO_FINITE_NUMBER = "The model gave no finite number to choose a token by"
UNDECODABLE = "The tokenizer could not decode a token, the log says why"


class Executor(Protocol):
    """The data plane, seen from the engine."""

    def execute(self, step: StepInput) -> StepOutput:
        """Computes one step. Whatever it raises fails the step's requests."""


class LLMEngine:
    """Generates for many requests at once. Not thread-safe, but for `prepare`, which only reads what never changes."""

    def __init__(self, settings: EngineSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._random = random.Random(settings.seed)
        self._block_manager = BlockManager(
            settings.num_blocks, settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
        )
        self._scheduler = Scheduler(settings, self._block_manager)
        self._requests: dict[str, Request] = {}
        self._beams: dict[str, Beams] = {}
        """Of the requests that search with them."""
        self._plan_in_flight: StepPlan | None = None
        self._failures: dict[str, RequestFailedError] = {}
        self._counts = RequestCounts()
        self._clock = StepClock()
        self._last_rules: tuple[SamplingParams, GenerationRules] | None = None
        """Of the last request that was prepared."""

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._requests)

    def add_request(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> Request:
        """Checks a request and queues it. Raises RequestError for what can never work."""
        request = self.prepare(request_id, prompt, prompt_token_ids, params)
        self.enqueue(request)
        return request

    def prepare(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | None,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
    ) -> Request:
        """Checks a request without queueing it; without `prompt_token_ids` the prompt is tokenised. Any thread may."""
        rules = self._known_rules(params)
        if rules is None:
            self._check_params(params)
        if prompt_token_ids is None:
            prompt_token_ids = self._tokenise(prompt or "", params, add_special_tokens=add_special_tokens)
        if params.truncate_prompt_tokens is not None:
            prompt_token_ids = prompt_token_ids[-params.truncate_prompt_tokens :]
        self._check_prompt(prompt_token_ids, params)
        rules = self._rules(params, rules, len(prompt_token_ids))
        first = GeneratedSequence(0, prompt_token_ids, rules, Detokenizer(self._tokenizer, params, prompt_token_ids))
        others = [] if params.use_beam_search else [first.fork(index) for index in range(1, params.num_candidates)]
        for other in others:  # until it starts: a queue may be long
            other.token_ids = first.token_ids
        return Request(request_id, prompt, prompt_token_ids, params, [first, *others])

    def quick_size(
        self, prompt: str | None, prompt_token_ids: Sequence[int] | None, params: SamplingParams
    ) -> int | None:
        """Characters and ids, where `prepare` is sure to take milliseconds at most, as a thread does; else None."""
        lists = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
        size = len((prompt or "") if prompt_token_ids is None else prompt_token_ids) + sum(len(x) for x in lists if x)
        is_small = size <= MAX_QUICK_SIZE and params.num_candidates <= MAX_QUICK_CANDIDATES and not params.bad_words
        return size if is_small and self._tokenizer.is_quick else None

    def enqueue(self, request: Request, arrival_time_s: float | None = None) -> None:
        """Queues a request that `prepare` made. Raises RequestError where its id is taken.

        `arrival_time_s` is when its caller brought it, in seconds of the monotonic clock; None means now.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id {request.request_id!r} is in use by another request.")
        seed = self._random.getrandbits(64) if request.params.seed is None else request.params.seed
        for sequence in (*request.sequences, *request.unstarted):
            sequence.seed = candidate_seed(seed, sequence.index)
        self._requests[request.request_id] = request
        self._counts.num_accepted += 1
        request.queued_time_s = time.monotonic()
        request.arrival_time_s = request.queued_time_s if arrival_time_s is None else arrival_time_s
        if request.params.use_beam_search:
            self._beams[request.request_id] = Beams(_beam_rules(request))
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestDelta | None:
        """Ends a request and returns its last delta; None where there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None or request.is_aborted:
            return None
        self._counts.num_aborted += 1
        request.is_aborted = True
        request.outcome = "abort"
        outputs = tuple(sequence.abort() for sequence in (*request.unfinished_sequences, *request.unstarted))
        if (beams := self._beams.get(request_id)) is not None:
            outputs = tuple(
                replace(output, score=beams.score(sequence)) for output, sequence in zip(outputs, request.sequences)
            )
        if self._plan_in_flight is None:
            self._remove(request)
        return RequestDelta(request_id, outputs, finished=True)

    def step(self, executor: Executor) -> list[RequestDelta]:
        """One whole step. An exception of the executor leaves it open: `fail_step` closes it."""
        step = self.begin_step()
        return [] if step is None else self.finish_step(executor.execute(step))

    def begin_step(self) -> StepInput | None:
        """What to compute next; None where there is no request."""
        assert self._plan_in_flight is None, "finish_step or fail_step must come first"
        if not self._requests:
            return None
        self._clock.begin(time.monotonic())
        self._plan_in_flight = self._scheduler.schedule()
        step = pack(self._plan_in_flight)
        self._clock.end_phase("schedule", time.monotonic())
        return step

    def finish_step(self, output: StepOutput) -> list[RequestDelta]:
        """Takes the step's tokens: one delta for each request that got some. See also `take_failures`."""
        plan = self._close_step()
        rows, scored = sampled_rows(plan, output), scored_tokens(plan, output)
        self._scheduler.mark_computed(plan)
        self._note_prompt_logprobs(scored)
        rows_of: dict[str, list[RowResult]] = {}
        for row in rows:
            rows_of.setdefault(row.request.request_id, []).append(row)
        deltas = [self._take_rows(rows[0].request, rows) for rows in rows_of.values()]
        self._remove_aborted()
        self._clock.end_phase("postprocess", time.monotonic())
        return [delta for delta in deltas if delta is not None]

    def fail_step(self) -> list[str]:
        """Closes a step that raised: its requests are gone, and their ids are returned. No other is touched."""
        plan = self._close_step()
        failed = {scheduled.request.request_id: scheduled.request for scheduled in plan.scheduled}
        for request in failed.values():
            self._remove(request)
        self._remove_aborted()
        request_ids = [request_id for request_id, request in failed.items() if not request.is_aborted]
        for request_id in request_ids:
            self._count_failure(failed[request_id])
        return request_ids

    def give_up(self) -> None:
        """Nothing will be computed any more: counts the requests that are left as failed. To be called once."""
        for request in self._requests.values():
            if not request.is_aborted:
                self._count_failure(request)

    def take_failures(self) -> dict[str, RequestFailedError]:
        """The requests that failed in the last step though the step itself did not, each by its id. Clears them."""
        failures, self._failures = self._failures, {}
        return failures

    def stats(self) -> EngineStats:
        """A snapshot."""
        counts = self._counts
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_free_blocks=self._block_manager.num_free_blocks,
            num_total_blocks=self._block_manager.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_accepted=counts.num_accepted,
            num_finished=dict(counts.num_finished),
            num_aborted=counts.num_aborted,
            num_failed=counts.num_failed,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_generated_tokens=counts.num_generated_tokens,
            num_prefix_queried_tokens=self._scheduler.num_prefix_queried_tokens,
            num_prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            queue_times=self._scheduler.queue_times.counts(),
            first_token_times=counts.first_token_times.counts(),
            inter_token_times=counts.inter_token_times.counts(),
            end_to_end_times=counts.end_to_end_times.counts(),
            step_times=self._clock.times(),
        )

    def _known_rules(self, params: SamplingParams) -> GenerationRules | None:
        """Of several prompts with the same parameters the first has paid for the rules, and all share its lists.

        Otherwise a thousand bad words would be tokenised, and their ids kept, for each of a thousand prompts.
        """
        last = self._last_rules
        return last[1] if last is not None and last[0] is params else None

    def _rules(self, params: SamplingParams, known: GenerationRules | None, num_prompt_tokens: int) -> GenerationRules:
        if known is not None:
            return replace(known, max_sequence_len=max_sequence_len(params, num_prompt_tokens, self._settings))
        rules = make_rules(params, num_prompt_tokens, self._settings, self._tokenizer)
        self._last_rules = params, rules
        return rules

    def _check_params(self, params: SamplingParams) -> None:
        settings = self._settings
        params.check_limits(
            vocab_size=settings.vocab_size, max_num_seqs=settings.max_num_seqs, max_logprobs=settings.max_logprobs
        )
        if params.use_beam_search and params.num_candidates > settings.max_num_batched_tokens:
            raise RequestError(
                f"best_of must be at most {settings.max_num_batched_tokens} (--max-num-batched-tokens) in beam search, "
                f"got {params.num_candidates}.",
                "best_of",
            )

    def _tokenise(self, prompt: str, params: SamplingParams, *, add_special_tokens: bool) -> list[int]:
        """Refuses a prompt that is surely too long before the time and memory to tokenise it are spent.

        The number of bytes is what is left to go by where only the end of the prompt will be used, and where the
        tokenizer cannot tell how few tokens a text may have.
        """
        check_unicode("prompt", prompt)
        if params.truncate_prompt_tokens is None:
            self._check_prompt_len(self._tokenizer.min_num_tokens(prompt), params, "at least ")
        num_bytes = len(prompt.encode())
        limit = MIN_PROMPT_BYTES + MAX_BYTES_PER_TOKEN * self._settings.max_model_len
        if num_bytes > limit:
            raise RequestError(
                f"prompt must have at most {limit} bytes for a context of {self._settings.max_model_len} tokens, "
                f"got {num_bytes}.",
                "prompt",
            )
        return self._tokenizer.encode(prompt) if add_special_tokens else self._tokenizer.encode_plain(prompt)

    def _check_prompt(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if not prompt_token_ids:
            raise RequestError("prompt must have at least one token, got one that has none.", "prompt")
        limit = self._settings.vocab_size - 1
        for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token_id <= limit:
                raise RequestError(
                    f"prompt must have token ids from 0 to {limit} (the model's), got {token_id}.", "prompt"
                )
        self._check_prompt_len(len(prompt_token_ids), params)

    def _check_prompt_len(self, num_prompt_tokens: int, params: SamplingParams, qualifier: str = "") -> None:
        limit = self._settings.max_sequence_len(params.num_candidates)
        if num_prompt_tokens < limit:
            return
        name = "context" if limit == self._settings.max_model_len else "KV cache"
        share = f" for each of {params.num_candidates} candidates" if params.num_candidates > 1 else ""
        raise RequestError(
            f"prompt must leave room for at least one token: it has {qualifier}{num_prompt_tokens} tokens and the "
            f"{name} holds {limit}{share}.",
            "prompt",
        )

    def _note_prompt_logprobs(self, scored: Sequence[ScoredToken]) -> None:
        for request, logprobs in scored:
            if request.is_aborted or request.status is RequestStatus.FINISHED:
                continue
            assert request.prompt_logprobs is not None
            if all(map(math.isfinite, logprobs.values())):
                request.prompt_logprobs.append(logprobs)
            else:
                self._fail(request, NO_FINITE_NUMBER)

    def _take_rows(self, request: Request, rows: list[RowResult]) -> RequestDelta | None:
        """What the step brought a request, and whom it brought to an end."""
        if request.is_aborted or request.status is RequestStatus.FINISHED:
            return None
        if any(row.token_id == NO_TOKEN for row in rows):
            self._fail(request, NO_FINITE_NUMBER)
            return None
        is_first = request.sequences[0].num_output_tokens == 0
        self._count_tokens(request, len(rows), is_first=is_first)
        advance = self._advance_beams if request.params.use_beam_search else self._append
        try:
            outputs = advance(request, rows)
        except UndecodableError as error:
            self._fail(request, UNDECODABLE, error)
            return None
        is_finished = request.is_finished
        if is_finished:
            ends = outputs if request.params.use_beam_search else request.sequences
            reasons, time_s = [end.finish_reason for end in ends], request.last_token_time_s - request.arrival_time_s
            request.outcome = self._counts.finish(reasons, time_s)
            self._remove(request)
        return RequestDelta(
            request.request_id, outputs, is_finished, prompt_logprobs=request.prompt_logprobs if is_first else None
        )

    def _count_tokens(self, request: Request, num_tokens: int, *, is_first: bool) -> None:
        counts, now_s = self._counts, time.monotonic()
        if is_first:
            counts.num_prompt_tokens += request.sequences[0].num_prompt_tokens
            counts.first_token_times.observe(now_s - request.arrival_time_s)
            request.first_token_time_s = now_s
        else:
            counts.inter_token_times.observe(now_s - request.last_token_time_s)
        counts.num_generated_tokens += num_tokens
        request.num_generated_tokens += num_tokens
        request.last_token_time_s = now_s

    def _append(self, request: Request, rows: list[RowResult]) -> tuple[CompletionDelta, ...]:
        """The next token of each candidate; the first ones start the candidates."""
        for candidate in request.unstarted:
            candidate.token_ids = candidate.token_ids[:]
            candidate.blocks = self._block_manager.fork(request.sequences[0].blocks)
            candidate.num_computed_tokens = request.sequences[0].num_computed_tokens
        request.sequences += request.unstarted
        request.unstarted = []
        outputs = tuple(row.sequence.append(row.token_id, row.logprob, row.top_logprobs) for row in rows)
        for row in rows:
            if row.sequence.finish_reason is not None:
                self._block_manager.free(row.sequence.blocks)
        return outputs

    def _advance_beams(self, request: Request, rows: list[RowResult]) -> tuple[CompletionDelta, ...]:
        """The sequences that go on take over the blocks of those that they come out of."""
        candidates = [row.candidates for row in rows if row.candidates is not None]
        step = self._beams[request.request_id].advance(request.sequences, candidates)
        for sequence, parent in zip(step.sequences, step.parents):
            sequence.blocks = self._block_manager.fork(parent.blocks)
        for sequence in request.sequences:
            self._block_manager.free(sequence.blocks)
        request.sequences = step.sequences
        return step.outputs

    def _count_failure(self, request: Request) -> None:
        self._counts.num_failed += 1
        request.outcome = "failed"

    def _fail(self, request: Request, reason: str, cause: Exception | None = None) -> None:
        """Ends one request of a step. Its caller is told the reason; the cause is for the log."""
        self._count_failure(request)
        failure = self._failures[request.request_id] = RequestFailedError(
            f"{reason}; this request has ended, others are not affected."
        )
        failure.__cause__ = cause
        for sequence in request.sequences:
            self._block_manager.forget_content(sequence.blocks)
        self._remove(request)

    def _close_step(self) -> StepPlan:
        assert self._plan_in_flight is not None, "begin_step must come first"
        plan, self._plan_in_flight = self._plan_in_flight, None
        self._clock.end_phase("execute", time.monotonic())
        return plan

    def _remove_aborted(self) -> None:
        for request in [request for request in self._requests.values() if request.is_aborted]:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        if request.status is not RequestStatus.FINISHED:
            self._scheduler.remove(request)
            del self._requests[request.request_id]
            self._beams.pop(request.request_id, None)


def _beam_rules(request: Request) -> BeamRules:
    params, rules = request.params, request.sequences[0].rules
    return BeamRules(
        width=params.num_candidates,
        num_end_ids=len(rules.eos_ids | rules.stop_ids),
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_output_len=rules.max_sequence_len - len(request.prompt_token_ids),
    )
