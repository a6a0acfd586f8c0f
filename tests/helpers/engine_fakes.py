"""Stand-ins for tests of the control plane: an executor without a model, engines of any size, a check of all blocks.

`FakeExecutor` keeps token ids where a real one keeps keys and values, and chooses the next token from what it reads
back through the block tables. So a wrong table, slot, copy or reused block gives other tokens, as it would in earnest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tests.helpers.byte_tokenizer import ByteTokenizer
from vllm_lite.engine.block_manager import BlockManager, BlockTable
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.step import (
    NO_CONTINUATIONS,
    NO_LOGPROBS,
    NO_TOKEN,
    Continuations,
    Float32Array,
    Int32Array,
    Logprobs,
    StepInput,
    StepOutput,
)
from vllm_lite.outputs import OutputAccumulator, RequestDelta, RequestOutput
from vllm_lite.sampling_params import SamplingParams

EOS = 0
STOP = 1
VOCAB_SIZE = 258

SETTINGS = EngineSettings(
    block_size=8,
    num_blocks=200,
    max_model_len=512,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    max_logprobs=20,
    enable_prefix_caching=True,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({EOS}),
    seed=None,
)


def make_engine(**changes: object) -> LLMEngine:
    """An engine with `SETTINGS`, but for the given fields."""
    return LLMEngine(replace(SETTINGS, **changes), ByteTokenizer())  # type: ignore[arg-type]


class FakeExecutor:
    """Chooses by a hash of all tokens of a sequence; a sampled row by its seed and position too."""

    def __init__(self, *, block_size: int = SETTINGS.block_size, num_blocks: int = SETTINGS.num_blocks) -> None:
        self.block_size = block_size
        self.vocab_size = VOCAB_SIZE
        self.steps: list[StepInput] = []
        num_slots = num_blocks * block_size
        self._token_ids = np.full(num_slots, -1, np.int64)
        self._positions = np.full(num_slots, -1, np.int64)

    def execute(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        check_step(step, self.block_size)
        for store in (self._token_ids, self._positions):
            blocks = store.reshape(-1, self.block_size)
            blocks[step.copy_destinations] = blocks[step.copy_sources]
        self._token_ids[step.slot_mapping] = step.token_ids
        self._positions[step.slot_mapping] = step.positions
        last_indices = (step.query_starts[1:] - 1).tolist()
        contexts = [self.read_back(step, last_indices.index(i)) for i in step.sampling.token_indices.tolist()]
        tokens = [self.choose(step, row, context) for row, context in enumerate(contexts)]
        return StepOutput(
            np.array(tokens, np.int32),
            logprobs=self._logprobs(
                [(contexts[row], tokens[row]) for row in step.sampling.logprob_rows], step.sampling.num_logprobs
            ),
            continuations=self._continuations(step, contexts),
            scores=self._logprobs(self._scored(step), step.scoring.num_logprobs),
        )

    def distribution(self, context: Sequence[int]) -> Float32Array:
        """Logprobs of all tokens after a context: any, but always the same."""
        digest = hashlib.blake2b(np.array(context, np.uint64).tobytes(), digest_size=8).digest()
        logits = np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 3, self.vocab_size)
        logprobs: Float32Array = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        return logprobs

    def _scored(self, step: StepInput) -> list[tuple[list[int], int]]:
        """What precedes each scored token, and the token."""
        scored = []
        for index, token_id in zip(step.scoring.token_indices.tolist(), step.scoring.token_ids.tolist()):
            sequence = int(np.searchsorted(step.query_starts, index, side="right")) - 1
            context = self.read_back(step, sequence)
            num_after = int(step.query_starts[sequence + 1]) - 1 - index
            scored.append((context[: len(context) - num_after], token_id))
        return scored

    def _logprobs(self, rows: Sequence[tuple[Sequence[int], int]], counts: Int32Array) -> Logprobs:
        if not rows:
            return NO_LOGPROBS
        tables = np.stack([self.distribution(context) for context, _ in rows])
        top_ids = np.argsort(-tables, axis=1, kind="stable")[:, : counts.max()].astype(np.int32)
        of_tokens = np.array([table[max(token_id, 0)] for table, (_, token_id) in zip(tables, rows)], np.float32)
        return Logprobs(of_tokens, top_ids, np.take_along_axis(tables, top_ids, axis=1))

    def _continuations(self, step: StepInput, contexts: Sequence[Sequence[int]]) -> Continuations:
        sampling = step.sampling
        if not len(sampling.beam_rows):
            return NO_CONTINUATIONS
        tables = np.stack([self.distribution(contexts[row]) for row in sampling.beam_rows])
        for table, row in zip(tables, sampling.beam_rows):
            table[sampling.banned_ids[sampling.banned_rows == row]] = -np.inf
        ids = np.argsort(-tables, axis=1, kind="stable")[:, : sampling.num_continuations.max()].astype(np.int32)
        return Continuations(ids, np.take_along_axis(tables, ids, axis=1))

    def read_back(self, step: StepInput, sequence: int) -> list[int]:
        """The token ids of a whole context, as the cache holds them."""
        positions = np.arange(step.context_lens[sequence])
        slots = step.block_tables[sequence][positions // self.block_size] * self.block_size
        slots += positions.astype(np.int32) % self.block_size
        assert np.array_equal(self._positions[slots], positions), "the cache holds tokens of other positions"
        ids: list[int] = self._token_ids[slots].tolist()
        return ids

    def choose(self, step: StepInput, row: int, context: Sequence[int]) -> int:
        """The next token: the first allowed one of an order that the context, and the seed if any, decide."""
        sampling = step.sampling
        salt = (sampling.seeds[row], sampling.positions[row]) if sampling.temperatures[row] > 0 else ()
        data = np.array([*context, *salt], np.uint64).tobytes()
        digest = hashlib.blake2b(data, digest_size=8).digest()
        first = int.from_bytes(digest, "little") % self.vocab_size
        banned = set(sampling.banned_ids[sampling.banned_rows == row].tolist())
        allowed = set(range(self.vocab_size))
        for i in np.flatnonzero(sampling.allowed_rows == row):
            allowed = set(sampling.allowed_ids[sampling.allowed_starts[i] : sampling.allowed_starts[i + 1]].tolist())
        order = ((first + offset) % self.vocab_size for offset in range(self.vocab_size))
        return next((token_id for token_id in order if token_id in allowed and token_id not in banned), NO_TOKEN)


class ScriptedExecutor(FakeExecutor):
    """Says the ids that a script holds for a prompt, then the end of sequence."""

    def __init__(self, scripts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__()
        self._scripts = scripts

    def choose(self, step: StepInput, row: int, context: Sequence[int]) -> int:
        num_output_tokens = int(step.sampling.positions[row])
        prompt = tuple(context[: len(context) - num_output_tokens])
        script = self._scripts[prompt]
        return script[num_output_tokens] if num_output_tokens < len(script) else EOS


class FailingExecutor(FakeExecutor):
    """Raises in the steps for which `fails(number of the step, step)` is true."""

    def __init__(self, fails: Callable[[int, StepInput], bool]) -> None:
        super().__init__()
        self._fails = fails

    def execute(self, step: StepInput) -> StepOutput:
        if self._fails(len(self.steps), step):
            self.steps.append(step)
            raise RuntimeError("the device is on fire")
        return super().execute(step)


def check_step(step: StepInput, block_size: int) -> None:
    """What `StepInput` promises of any step."""
    shape, sampling = step.shape, step.sampling
    num_new = np.diff(step.query_starts)
    assert shape.num_tokens == len(step.token_ids) == len(step.positions) == len(step.slot_mapping) == num_new.sum()
    assert shape.num_seqs == len(step.context_lens) == len(step.block_tables) == len(num_new)
    assert shape.num_decodes == (num_new == 1).sum() and (num_new[: shape.num_decodes] == 1).all()
    assert (num_new >= 1).all() and shape.max_query_len == num_new.max()
    assert shape.max_context_len == step.context_lens.max() and shape.num_rows == sampling.num_rows
    for sequence, (start, end) in enumerate(zip(step.query_starts[:-1], step.query_starts[1:])):
        positions = step.positions[start:end]
        context_len = step.context_lens[sequence]
        assert positions.tolist() == list(range(context_len - (end - start), context_len))
        blocks = step.block_tables[sequence][positions // block_size]
        assert step.slot_mapping[start:end].tolist() == (blocks * block_size + positions % block_size).tolist()
    assert len(set(step.slot_mapping.tolist())) == shape.num_tokens, "two tokens in one slot"
    assert len(step.copy_sources) == len(step.copy_destinations)
    assert np.isin(sampling.token_indices, step.query_starts[1:] - 1).all()
    assert (np.diff(sampling.token_indices) >= 0).all()
    for name, values in (*vars(step).items(), *vars(sampling).items()):
        if isinstance(values, np.ndarray):
            assert values.flags.c_contiguous and values.dtype in (np.int32, np.float32, np.uint64), name
    for name in ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "history_prompt_lens"):
        assert getattr(sampling, name).shape == (sampling.num_rows,), name
    assert sampling.history_starts[-1] == len(sampling.history_ids)
    assert len(sampling.history_starts) == sampling.num_rows + 1
    assert len(sampling.bias_rows) == len(sampling.bias_ids) == len(sampling.bias_values)
    assert len(sampling.banned_rows) == len(sampling.banned_ids)
    assert len(sampling.allowed_starts) == len(sampling.allowed_rows) + 1
    assert len(sampling.logprob_rows) == len(sampling.num_logprobs)
    assert len(sampling.beam_rows) == len(sampling.num_continuations)
    assert len(step.scoring.token_indices) == len(step.scoring.token_ids) == len(step.scoring.num_logprobs)


def check_blocks(manager: BlockManager, tables: Iterable[BlockTable]) -> None:
    """No leak, no double owner, right counts, and every name leads to the block that bears it."""
    owners = Counter(block_id for table in tables for block_id in table.block_ids)
    free = [*manager._blank_ids, *manager._reusable_ids]
    assert len(free) == len(set(free)) == manager.num_free_blocks
    assert set(free).isdisjoint(owners)
    assert set(free) | set(owners) == set(range(manager.num_blocks))
    assert manager._ref_counts == [owners[block_id] for block_id in range(manager.num_blocks)]
    assert all(manager._prefix_of[block_id] is None for block_id in manager._blank_ids)
    assert all(manager._prefix_of[block_id] is not None for block_id in manager._reusable_ids)
    names = {block_id: prefix for block_id, prefix in enumerate(manager._prefix_of) if prefix is not None}
    assert {block_id: prefix for prefix, block_id in manager._block_of.items()} == names


def check_engine(engine: LLMEngine) -> None:
    """The blocks of all requests, and the two orders that the scheduler keeps."""
    scheduler = engine._scheduler
    requests = [*scheduler.running, *scheduler.waiting]
    assert requests == sorted(requests, key=list(engine._requests.values()).index), "order of arrival"
    check_blocks(engine._block_manager, [sequence.blocks for request in requests for sequence in request.sequences])
    assert not any(sequence.blocks.block_ids for request in scheduler.waiting for sequence in request.sequences)


class Run:
    """Drives an engine step by step, checks it after each, and adds up what every request got."""

    def __init__(self, engine: LLMEngine, executor: FakeExecutor) -> None:
        self.engine = engine
        self.executor = executor
        self.outputs: dict[str, OutputAccumulator] = {}
        self.deltas: dict[str, list[RequestDelta]] = {}

    def add(self, request_id: str, prompt: str, params: SamplingParams) -> None:
        ids = ByteTokenizer().encode(prompt)
        self.engine.add_request(request_id, prompt, ids, params)
        self.outputs[request_id] = OutputAccumulator(request_id, prompt, ids, params.n)
        self.deltas[request_id] = []

    def step(self) -> None:
        for delta in self.engine.step(self.executor):
            assert delta.outputs and all(len(o.token_ids) == 1 or o.parent is not None for o in delta.outputs)
            self.outputs[delta.request_id].add(delta)
            self.deltas[delta.request_id].append(delta)
        check_engine(self.engine)

    def finish(self, max_steps: int = 5000) -> dict[str, RequestOutput]:
        """Steps until nothing is left, and looks at the blocks afterwards."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, "a request starves"
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_total_blocks
        return {request_id: output.output() for request_id, output in self.outputs.items()}

    def token_ids(self) -> dict[str, list[int]]:
        """The output ids of each request, after `finish`."""
        return {request_id: list(output.outputs[0].token_ids) for request_id, output in self.finish().items()}


def greedy(**changes: object) -> SamplingParams:
    """Greedy parameters that end by length only, but for the given fields."""
    fields: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30, **changes}
    return SamplingParams(**fields)  # type: ignore[arg-type]
