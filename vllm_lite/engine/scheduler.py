"""Chooses what each step computes: waiting and running queues, token budget, admission, preemption. Knows no text.

Two orders hold at all times and make the rest simple: both queues are sorted by arrival, and every running request
arrived before every waiting one. So the requests at the end of `running` are the latest, the one whose prompt is being
computed is among them, and a preempted request belongs at the front of `waiting`.
"""

from __future__ import annotations

import time
from collections import deque

from vllm_lite.engine.block_manager import BlockManager
from vllm_lite.engine.sequence import Request, RequestStatus, Sequence
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.statistics import TimeHistogram
from vllm_lite.engine.step import ScheduledSequence, StepPlan, scheduled_sequence


class Scheduler:
    """Serves requests in the order of arrival, each step with as many tokens as the budget holds.

    The oldest running request is served in every step, because younger ones make room for it. So every request
    finishes, whatever the others do.
    """

    def __init__(self, settings: EngineSettings, block_manager: BlockManager) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_queried_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.queue_times = TimeHistogram()
        self._settings = settings
        self._block_manager = block_manager

    def add(self, request: Request) -> None:
        """Takes a request that fits into an empty cache."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a request, wherever it stands, and frees its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._free_blocks(request)

    def schedule(self) -> StepPlan:
        """Plans the next step and gives its sequences the blocks they need. Empty only when there is no request."""
        budget = self._settings.max_num_batched_tokens
        scheduled, longer = self._schedule_decodes(budget)
        budget -= len(scheduled)
        for request, sequence in longer:
            if request.status is RequestStatus.RUNNING:
                budget -= self._schedule_chunk(request, sequence, budget, scheduled)
        while budget > 0 and (found := self._find_prefixes_if_fits()) is not None:
            request = self._admit(found)
            for sequence in request.unfinished_sequences:
                budget -= self._schedule_chunk(request, sequence, budget, scheduled)
        if not scheduled:  # beams that were admitted again with all that they lack but their last tokens
            scheduled, _ = self._schedule_decodes(budget)
        assert scheduled or not (self.running or self.waiting), "a step without progress"
        scheduled.sort(key=_brings_several_tokens)
        return StepPlan(self._settings.block_size, scheduled)

    def mark_computed(self, plan: StepPlan) -> None:
        """Notes that the K/V of a step's tokens exist, from now on also for other requests with the same prefix."""
        for scheduled in plan.scheduled:
            sequence = scheduled.sequence
            sequence.num_computed_tokens += scheduled.num_tokens
            computed_blocks = sequence.num_computed_tokens // self._settings.block_size
            if computed_blocks > sequence.blocks.num_named_blocks:
                self._block_manager.register_computed(sequence.blocks, sequence.token_ids, sequence.num_computed_tokens)

    def _schedule_decodes(self, budget: int) -> tuple[list[ScheduledSequence], list[tuple[Request, Sequence]]]:
        """One token for each sequence that lacks just one, the oldest first; later requests make room if need be.

        Also returns the sequences that lack more.
        """
        scheduled: list[ScheduledSequence] = []
        longer: list[tuple[Request, Sequence]] = []
        position = 0
        while position < len(self.running) and len(scheduled) < budget:  # preemption takes requests from the end
            request = self.running[position]
            position += 1
            decodes: list[Sequence] = []
            for sequence in request.unfinished_sequences:
                if sequence.num_uncomputed_tokens > 1:
                    longer.append((request, sequence))
                else:
                    decodes.append(sequence)
            room = budget - len(scheduled)
            if request.params.use_beam_search and not room >= len(decodes) == len(request.sequences):
                continue  # beams take their next tokens together
            group: list[ScheduledSequence] = []
            for sequence in decodes[:room]:
                if not self._make_room(request, sequence):
                    group.clear()
                    break
                group.append(self._allocate(request, sequence, 1))
            scheduled += group
        return scheduled, longer

    def _schedule_chunk(
        self, request: Request, sequence: Sequence, budget: int, scheduled: list[ScheduledSequence]
    ) -> int:
        """As many of a sequence's tokens as budget and free blocks hold: it may have to wait for an older one.

        The last token of one beam among several waits for those of the others.
        """
        room = self._block_manager.num_writable_tokens(sequence.blocks, sequence.num_computed_tokens)
        is_beam = request.params.use_beam_search and len(request.sequences) > 1
        num_tokens = min(sequence.num_uncomputed_tokens - is_beam, budget, room)
        if num_tokens <= 0:
            return 0
        scheduled.append(self._allocate(request, sequence, num_tokens))
        return num_tokens

    def _allocate(self, request: Request, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        copies = self._block_manager.allocate(sequence.blocks, start, start + num_tokens)
        return scheduled_sequence(request, sequence, num_tokens, copies)

    def _make_room(self, request: Request, sequence: Sequence) -> bool:
        """Preempts the latest requests until the sequence's next token has a block. False if that hit its own."""
        start = sequence.num_computed_tokens
        while not self._block_manager.can_allocate(sequence.blocks, start, start + 1):
            latest = self.running[-1]
            assert latest is not self.running[0], "a request alone in the cache always fits, or it was refused"
            self._preempt(latest)
            if latest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Takes the latest running request out, to be computed again from its first token when there is room."""
        self.running.remove(request)
        self._free_blocks(request)
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _find_prefixes_if_fits(self) -> list[list[int]] | None:
        """What blocks exist already of each sequence of the request that waits longest, if it fits now.

        None where it does not, with all of its tokens, or where none waits.
        Blocks are allocated chunk by chunk, but nothing is promised twice: where an earlier prompt is not through yet,
        the budget is used up. Each running sequence keeps a free block to grow into, or newcomers would be preempted
        as soon as they are computed: under overload that wasted 30 % of all work in `scripts/kv_report`.
        """
        if not self.waiting:
            return None
        request = self.waiting[0]
        sequences = request.unfinished_sequences
        num_running = sum(other.num_slots for other in self.running)
        if num_running + request.num_slots > self._settings.max_num_seqs:
            return None
        found = [self._find_prefix(request, sequence) for sequence in sequences]
        group = [(sequence.num_tokens, block_ids) for sequence, block_ids in zip(sequences, found)]
        num_later = request.num_slots - len(sequences)  # each gets a copy of the last block of the prompt
        return found if self._block_manager.can_admit(group, num_reserved=num_running + num_later) else None

    def _admit(self, found: list[list[int]]) -> Request:
        """Moves the request that waits longest to the running ones, with the blocks that exist already."""
        request = self.waiting.popleft()
        request.status = RequestStatus.RUNNING
        if request.admission_time_s is None:
            request.admission_time_s = time.monotonic()
            self.queue_times.observe(request.admission_time_s - request.queued_time_s)
        self.running.append(request)
        for sequence, block_ids in zip(request.unfinished_sequences, found):
            self._block_manager.share_prefix(sequence.blocks, block_ids)
            sequence.num_computed_tokens = len(block_ids) * self._settings.block_size
            self.num_prefix_queried_tokens += sequence.num_tokens
            self.num_prefix_hit_tokens += sequence.num_computed_tokens
        return request

    def _find_prefix(self, request: Request, sequence: Sequence) -> list[int]:
        """The blocks that need not be computed. Logits of the prompt exist only where it is computed."""
        if request.params.prompt_logprobs is not None:
            return []
        return self._block_manager.find_prefix(sequence.token_ids)

    def _free_blocks(self, request: Request) -> None:
        for sequence in request.sequences:
            self._block_manager.free(sequence.blocks)
            sequence.num_computed_tokens = 0


def _brings_several_tokens(scheduled: ScheduledSequence) -> bool:
    return scheduled.num_tokens != 1
