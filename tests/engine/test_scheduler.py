"""What goes into each step, and what happens when blocks run out."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.engine_fakes import (
    FakeExecutor,
    Run,
    check_engine,
    greedy,
    make_engine,
)
from vllm_lite.engine.detokenizer import Detokenizer
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.sequence import Request, RequestStatus, Sequence


def add(engine: LLMEngine, *prompt_lens: int, max_tokens: int = 30) -> list[Request]:
    """Requests named by their position, whose prompts have nothing in common."""
    first = len(engine._requests)
    return [
        engine.add_request(str(first + i), None, [34 + first + i] * length, greedy(max_tokens=max_tokens))
        for i, length in enumerate(prompt_lens)
    ]


def step(engine: LLMEngine, executor: FakeExecutor) -> list[tuple[str, int]]:
    """One step; returns who brought how many tokens."""
    step_input = engine.begin_step()
    assert step_input is not None and engine._plan_in_flight is not None
    brought = [(s.request.request_id, s.num_tokens) for s in engine._plan_in_flight.scheduled]
    engine.finish_step(executor.execute(step_input))
    check_engine(engine)
    return brought


def test_decodes_go_first_and_prompts_fill_the_budget() -> None:
    engine, executor = make_engine(max_num_batched_tokens=16), FakeExecutor()
    add(engine, 5, 6)
    assert step(engine, executor) == [("0", 5), ("1", 6)]
    add(engine, 40, 3)
    assert step(engine, executor) == [("0", 1), ("1", 1), ("2", 14)]
    assert step(engine, executor) == [("0", 1), ("1", 1), ("2", 14)]
    assert step(engine, executor) == [("0", 1), ("1", 1), ("2", 12), ("3", 2)]
    assert step(engine, executor) == [("0", 1), ("1", 1), ("2", 1), ("3", 1)]


def test_sequences_with_one_token_come_first_whatever_it_is() -> None:
    engine, executor = make_engine(max_num_batched_tokens=16), FakeExecutor()
    add(engine, 10, 1)
    assert step(engine, executor) == [("1", 1), ("0", 10)]


def test_one_token_prompts_are_served() -> None:
    run = Run(make_engine(max_num_batched_tokens=1), FakeExecutor())
    run.add("a", "x", greedy(max_tokens=3))
    run.add("b", "y", greedy(max_tokens=3))
    assert [len(ids) for ids in run.token_ids().values()] == [3, 3]


def test_a_budget_below_the_number_of_decodes_serves_the_oldest() -> None:
    engine, executor = make_engine(max_num_batched_tokens=3), FakeExecutor()
    add(engine, 1, 1, 1, 1, 1, max_tokens=4)
    assert [step(engine, executor) for _ in range(4)] == [[("0", 1), ("1", 1), ("2", 1)]] * 4
    assert step(engine, executor) == [("3", 1), ("4", 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    engine, executor = make_engine(max_num_seqs=2), FakeExecutor()
    add(engine, 4, 4, 4, max_tokens=2)
    assert step(engine, executor) == [("0", 4), ("1", 4)]
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)
    assert step(engine, executor) == [("0", 1), ("1", 1)]
    assert step(engine, executor) == [("2", 4)]


def test_who_waits_is_not_overtaken() -> None:
    engine, executor = make_engine(num_blocks=5), FakeExecutor()
    add(engine, 20, 20, 1, max_tokens=3)
    assert step(engine, executor) == [("0", 20)]
    assert step(engine, executor) == [("0", 1)], "the short one fits, but the long one came first"
    assert step(engine, executor) == [("0", 1)]
    assert step(engine, executor) == [("2", 1), ("1", 20)]


def test_each_running_sequence_keeps_a_free_block_to_grow_into() -> None:
    engine, executor = make_engine(num_blocks=4), FakeExecutor()
    add(engine, 8, 8, 8, max_tokens=3)
    assert step(engine, executor) == [("0", 8), ("1", 8)]
    assert step(engine, executor) == [("0", 1), ("1", 1)]
    assert step(engine, executor) == [("0", 1), ("1", 1)]
    assert step(engine, executor) == [("2", 8)]
    assert engine.stats().num_preemptions == 0


def test_blocks_are_allocated_chunk_by_chunk() -> None:
    engine, executor = make_engine(max_num_batched_tokens=8), FakeExecutor()
    add(engine, 40)
    step(engine, executor)
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks - 1


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    engine, executor = make_engine(num_blocks=5, enable_prefix_caching=False), FakeExecutor()
    first, second, third = add(engine, 8, 8, 8)
    fourth, *_ = add(engine, 30)
    assert step(engine, executor) == [("0", 8), ("1", 8), ("2", 8)]
    assert step(engine, executor) == [("0", 1), ("1", 1)], "two blocks were left for three"
    assert engine.stats().num_preemptions == 1
    assert list(engine._scheduler.waiting) == [third, fourth]
    assert (third.status, third.sequences[0].num_computed_tokens) == (RequestStatus.WAITING, 0)
    assert third.sequences[0].num_output_tokens == 1, "its output is kept"
    assert step(engine, executor) == [("0", 1), ("1", 1)], "9 tokens do not fit into one block"
    assert engine._scheduler.running == [first, second]


def test_a_prompt_waits_for_blocks_rather_than_lose_its_own() -> None:
    engine, executor = make_engine(num_blocks=8, max_num_batched_tokens=4), FakeExecutor()
    add(engine, 4, max_tokens=17)
    step(engine, executor)
    add(engine, 48, max_tokens=2)
    assert [step(engine, executor) for _ in range(13)] == [[("0", 1), ("1", 3)]] * 13
    assert step(engine, executor) == [("0", 1), ("1", 1)], "the older request took the last block"
    assert step(engine, executor) == [("0", 1)]
    while engine.has_unfinished:
        step(engine, executor)
    assert engine.stats().num_preemptions == 0


def test_a_long_request_finishes_in_a_steady_flow_of_short_ones() -> None:
    run = Run(make_engine(num_blocks=12, max_num_batched_tokens=16), FakeExecutor())
    run.add("short 0", "abc", greedy(max_tokens=5))
    run.add("long", "x" * 60, greedy(max_tokens=30))
    for index in range(1, 200):
        run.add(f"short {index}", "abc", greedy(max_tokens=5))
        run.step()
        if run.outputs["long"].finished:
            break
    assert run.outputs["long"].finished
    run.finish()


def test_a_prefix_is_shared_from_the_step_after_it_was_computed() -> None:
    engine, executor = make_engine(), FakeExecutor()
    for name in ("a", "b"):
        engine.add_request(name, None, [34] * 20, greedy())
    assert step(engine, executor) == [("a", 20), ("b", 20)]
    engine.add_request("c", None, [34] * 20, greedy())
    assert step(engine, executor) == [("a", 1), ("b", 1), ("c", 4)]
    assert (engine.stats().num_prefix_hit_tokens, engine.stats().num_prefix_queried_tokens) == (16, 60)


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    engine, executor = make_engine(), FakeExecutor()
    engine.add_request("a", None, [34] * 20, greedy())
    step(engine, executor)
    request = engine.prepare("b", None, [34] * 20, greedy())
    request.params = replace(request.params, prompt_logprobs=1)
    engine.enqueue(request)
    assert step(engine, executor) == [("a", 1), ("b", 20)]


def started_group(engine: LLMEngine, executor: FakeExecutor, prompt: list[int]) -> Request:
    """A request as the modes with several candidates will have them: one prompt is computed, then forked."""
    request = engine.add_request("group", None, prompt, greedy())
    step(engine, executor)
    parent = request.sequences[0]
    for index in (1, 2):
        fork = Sequence(index, prompt, parent.rules, Detokenizer(ByteTokenizer(), request.params, prompt))
        fork.blocks = engine._block_manager.fork(parent.blocks)
        fork.num_computed_tokens = parent.num_computed_tokens
        fork.token_ids.append(100 + index)
        request.sequences.append(fork)
    check_engine(engine)
    return request


def contexts_of(request: Request) -> list[list[int]]:
    return [sequence.token_ids.tolist() for sequence in request.sequences]


def test_a_group_shares_its_prompt_and_copies_on_write() -> None:
    engine, executor = make_engine(), FakeExecutor()
    contexts = contexts_of(started_group(engine, executor, [34] * 12))
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks - 2
    step_input = engine.begin_step()
    assert step_input is not None and len(step_input.copy_sources) == 2, "the last of three owners needs no copy"
    (delta,) = engine.finish_step(executor.execute(step_input))
    assert [output.index for output in delta.outputs] == [0, 1, 2]
    assert [executor.read_back(step_input, i) for i in range(3)] == contexts
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks - 4
    check_engine(engine)


def test_a_group_is_preempted_and_computed_again_as_one() -> None:
    engine, executor = make_engine(num_blocks=11), FakeExecutor()
    add(engine, 31)
    step(engine, executor)
    group = started_group(engine, executor, [34] * 12)
    contexts = contexts_of(group)
    while engine.stats().num_preemptions == 0:
        contexts = contexts_of(group)
        step(engine, executor)
    assert group.status is RequestStatus.WAITING and not any(s.blocks.block_ids for s in group.sequences)
    assert contexts_of(group) == contexts, "nothing of it was in the step"
    engine.abort("0")
    step_input = engine.begin_step()
    assert step_input is not None and step_input.shape.num_seqs == 3
    engine.finish_step(executor.execute(step_input))
    assert [executor.read_back(step_input, i) for i in range(3)] == contexts
    check_engine(engine)
    engine.abort("group")
    assert engine.stats().num_free_blocks == 11


def test_a_group_that_hits_itself_leaves_the_step() -> None:
    """Two of three sequences have a place in the step already when the third one finds no block."""
    engine, executor = make_engine(num_blocks=8), FakeExecutor()
    add(engine, 38)
    step(engine, executor)
    group = started_group(engine, executor, [35] * 8)
    contexts = contexts_of(group)
    assert engine.stats().num_free_blocks == 2, "one too few"
    assert step(engine, executor) == [("0", 1)]
    assert engine.stats().num_preemptions == 1 and engine.stats().num_free_blocks == 3
    assert contexts_of(group) == contexts


def test_a_finished_sequence_frees_its_blocks_before_its_group() -> None:
    engine, executor = make_engine(), FakeExecutor()
    group = started_group(engine, executor, [34] * 16)
    group.sequences[1].rules = replace(group.sequences[1].rules, max_sequence_len=18)
    (delta,) = engine.step(executor)
    assert not delta.finished and [output.finish_reason for output in delta.outputs] == [None, "length", None]
    assert not group.sequences[1].blocks.block_ids
    check_engine(engine)
    assert step(engine, executor) == [("group", 1), ("group", 1)]
