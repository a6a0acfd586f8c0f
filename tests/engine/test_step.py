"""A plan laid out in arrays."""

from __future__ import annotations

import numpy as np

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.engine_fakes import EOS, SETTINGS, check_step, greedy, make_engine
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.step import ScheduledSequence, StepInput, StepPlan, pack, scheduled_sequence
from vllm_lite.sampling_params import SamplingParams


def scheduled(
    engine: LLMEngine, params: SamplingParams, *, prompt: list[int], output: list[int], num_computed: int, num_new: int
) -> ScheduledSequence:
    """A sequence in the middle of its life."""
    request = engine.prepare("r", None, prompt, params)
    (sequence,) = request.sequences
    sequence.token_ids.extend(output)
    sequence.num_computed_tokens = num_computed
    engine._block_manager.allocate(sequence.blocks, 0, num_computed + num_new)
    sequence.seed = 2**64 - 1
    return scheduled_sequence(request, sequence, num_new, [])


def packed(*parts: ScheduledSequence) -> StepInput:
    step = pack(StepPlan(SETTINGS.block_size, list(parts)))
    check_step(step, SETTINGS.block_size)
    return step


def test_decodes_and_chunks_in_one_step() -> None:
    engine = make_engine()
    decode = scheduled(engine, greedy(), prompt=[10, 11, 12], output=list(range(20, 27)), num_computed=9, num_new=1)
    chunk = scheduled(engine, greedy(), prompt=list(range(30, 50)), output=[], num_computed=6, num_new=4)
    end = scheduled(engine, greedy(), prompt=list(range(60, 72)), output=[], num_computed=8, num_new=4)
    step = packed(decode, chunk, end)

    assert vars(step.shape) == {
        "num_tokens": 9,
        "num_seqs": 3,
        "num_decodes": 1,
        "max_query_len": 4,
        "max_context_len": 12,
        "num_rows": 2,
    }
    assert step.token_ids.tolist() == [26, 36, 37, 38, 39, 68, 69, 70, 71]
    assert step.positions.tolist() == [9, 6, 7, 8, 9, 8, 9, 10, 11]
    assert step.query_starts.tolist() == [0, 1, 5, 9]
    assert step.context_lens.tolist() == [10, 10, 12]
    assert step.block_tables.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert step.slot_mapping.tolist() == [9, 22, 23, 24, 25, 40, 41, 42, 43]
    assert step.sampling.token_indices.tolist() == [0, 8]
    assert step.sampling.positions.tolist() == [7, 0]
    assert step.sampling.seeds.tolist() == [2**64 - 1] * 2


def test_short_block_tables_are_padded() -> None:
    engine = make_engine()
    long = scheduled(engine, greedy(), prompt=[9] * 20, output=[8], num_computed=20, num_new=1)
    short = scheduled(engine, greedy(), prompt=[9] * 2, output=[], num_computed=0, num_new=2)
    assert packed(long, short).block_tables.tolist() == [[0, 1, 2], [3, 0, 0]]


def test_a_step_without_samples() -> None:
    step = packed(scheduled(make_engine(), greedy(), prompt=[9] * 20, output=[], num_computed=0, num_new=5))
    assert step.sampling.num_rows == step.shape.num_rows == 0
    assert step.sampling.history_starts.tolist() == [0]


def test_rows_carry_their_own_parameters() -> None:
    engine = make_engine()
    word = SamplingParams(bad_words=["ab"], temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)
    a, b = ByteTokenizer().encode("ab")
    with_word = scheduled(engine, word, prompt=[9], output=[a], num_computed=1, num_new=1)
    penalty = greedy(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={7: 1.5, 3: -4})
    with_history = scheduled(engine, penalty, prompt=[9, 8], output=[7], num_computed=2, num_new=1)
    plain = scheduled(engine, greedy(), prompt=[9], output=[5], num_computed=1, num_new=1)
    limits = SamplingParams(min_tokens=3, allowed_token_ids=[5, 4])
    limited = scheduled(engine, limits, prompt=[9], output=[5], num_computed=1, num_new=1)
    sampling = packed(with_word, with_history, plain, limited).sampling

    assert sampling.temperatures.tolist() == [0.5, 0, 0, 1]
    assert sampling.top_ks.tolist() == [7, 0, 0, 0]
    assert np.allclose(sampling.top_ps, [0.9, 1, 1, 1]) and np.allclose(sampling.min_ps, [0.1, 0, 0, 0])
    assert sampling.repetition_penalties.tolist() == [1, 1.5, 1, 1]
    assert sampling.presence_penalties.tolist() == [0, 0.5, 0, 0]
    assert sampling.frequency_penalties.tolist() == [0, -0.5, 0, 0]
    assert sampling.history_ids.tolist() == [9, 8, 7]
    assert sampling.history_starts.tolist() == [0, 0, 3, 3, 3]
    assert sampling.history_prompt_lens.tolist() == [0, 2, 0, 0]
    assert sampling.bias_rows.tolist() == [1, 1]
    assert sampling.bias_ids.tolist() == [7, 3]
    assert sampling.bias_values.tolist() == [1.5, -4]
    assert (sampling.banned_rows.tolist(), sampling.banned_ids.tolist()) == ([0, 3], [b, EOS])
    assert sampling.allowed_rows.tolist() == [3]
    assert sampling.allowed_starts.tolist() == [0, 2]
    assert sampling.allowed_ids.tolist() == [4, 5]


def test_copies_are_listed_with_their_sequences() -> None:
    engine = make_engine()
    parent = scheduled(engine, greedy(), prompt=[9] * 3, output=[4], num_computed=3, num_new=1)
    sequence = engine.prepare("fork", None, [9] * 3, greedy()).sequences[0]
    sequence.token_ids.append(5)
    sequence.num_computed_tokens = 3
    sequence.blocks = engine._block_manager.fork(parent.sequence.blocks)
    copies = engine._block_manager.allocate(sequence.blocks, 3, 4)
    step = packed(parent, scheduled_sequence(parent.request, sequence, 1, copies))
    assert (step.copy_sources.tolist(), step.copy_destinations.tolist()) == ([0], [1])
    assert step.slot_mapping.tolist() == [3, 11]
