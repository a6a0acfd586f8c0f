"""What the engine counts: every way in which a request ends, once; tokens; a time for each thing that took one."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from tests.engine.test_async_llm_engine import GatedTokenizer, NotFinite, collect, wait_for
from tests.helpers.engine_fakes import EOS, SETTINGS, FailingExecutor, FakeExecutor, Run, greedy, make_engine
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.statistics import BOUNDS_S, EngineStats, StepClock, TimeHistogram
from vllm_lite.engine.step import StepInput
from vllm_lite.errors import EngineDeadError, RequestError
from vllm_lite.sampling_params import SamplingParams

ANY_TOKEN = list(range(258))


def num_ended(stats: EngineStats) -> int:
    return sum(stats.num_finished.values()) + stats.num_aborted + stats.num_failed


def num_open(engine: LLMEngine) -> int:
    return sum(not request.is_aborted for request in engine._requests.values())


def test_a_time_falls_into_the_first_bucket_that_holds_it() -> None:
    histogram = TimeHistogram()
    for time_s in (0.0, BOUNDS_S[0], 0.0011, 0.002, 500.0, 501.0):
        histogram.observe(time_s)
    times = histogram.counts()
    counts = dict(zip((*BOUNDS_S, float("inf")), times.counts))
    assert {bound: count for bound, count in counts.items() if count} == {1e-5: 2, 0.002: 2, 500.0: 1, float("inf"): 1}
    assert times.total == 6
    assert times.sum_s == pytest.approx(1001.00311)
    histogram.observe(1.0)
    assert times.total == 6, "a snapshot stays as it is"


def test_bounds_grow_and_are_what_they_look_like() -> None:
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
    assert (BOUNDS_S[0], BOUNDS_S[-1], len(BOUNDS_S)) == (1e-5, 500.0, 24)


def test_a_step_is_split_without_a_gap() -> None:
    clock = StepClock()
    for start_s in (10.0, 20.0):
        clock.begin(start_s)
        clock.end_phase("schedule", start_s + 1)
        clock.end_phase("execute", start_s + 3)
    clock.end_phase("postprocess", 23.5)
    sums = {phase: (times.total, times.sum_s) for phase, times in clock.times().items()}
    assert sums == {"schedule": (2, 2.0), "execute": (2, 4.0), "postprocess": (1, 0.5)}


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (greedy(max_tokens=3), "length"),
        (greedy(stop_token_ids=ANY_TOKEN), "stop"),
        (SamplingParams(n=3, max_tokens=4, ignore_eos=True), "length"),
        (SamplingParams(n=3, max_tokens=4, stop_token_ids=ANY_TOKEN), "stop"),
        (SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0, max_tokens=4, ignore_eos=True), "length"),
    ],
    ids=str,
)
def test_a_request_counts_once_however_many_candidates_it_has(params: SamplingParams, reason: str) -> None:
    run = Run(make_engine(), FakeExecutor())
    run.add("r", "x" * 20, params)
    (output,) = run.finish().values()
    assert {candidate.finish_reason for candidate in output.outputs} == {reason}
    stats = run.engine.stats()
    assert stats.num_finished == {"stop": int(reason == "stop"), "length": int(reason == "length")}
    assert (stats.num_accepted, num_ended(stats)) == (1, 1)
    num_steps = len(run.deltas["r"])
    assert stats.num_prompt_tokens == 20
    assert stats.num_generated_tokens >= sum(len(candidate.token_ids) for candidate in output.outputs)
    for times, count in [
        (stats.queue_times, 1),
        (stats.first_token_times, 1),
        (stats.inter_token_times, num_steps - 1),
        (stats.end_to_end_times, 1),
        *((times, num_steps) for times in stats.step_times.values()),
    ]:
        assert times.total == count
    gaps_s = stats.first_token_times.sum_s + stats.inter_token_times.sum_s
    assert gaps_s == pytest.approx(stats.end_to_end_times.sum_s)
    assert min(times.sum_s for times in stats.step_times.values()) > 0


@pytest.mark.parametrize("stopping", [0, 1])
def test_a_candidate_that_was_cut_off_makes_the_reason_of_its_request(stopping: int) -> None:
    class OneStops(FakeExecutor):
        def choose(self, step: StepInput, row: int, context: object) -> int:
            return EOS if step.sampling.num_rows == 2 and row == stopping else 65

    run = Run(make_engine(), OneStops())
    run.add("r", "abc", SamplingParams(n=2, max_tokens=3))
    (output,) = run.finish().values()
    assert sorted(str(candidate.finish_reason) for candidate in output.outputs) == ["length", "stop"]
    assert run.engine.stats().num_finished == {"stop": 0, "length": 1}
    assert run.engine.stats().num_generated_tokens == 3 + 1


def test_refused_requests_are_not_accepted() -> None:
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.add_request("r", None, [], greedy())
    engine.add_request("r", None, [40], greedy())
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("r", None, [40], greedy())
    assert engine.stats().num_accepted == 1


def test_a_failed_step_counts_the_requests_that_it_failed() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in ("a", "b", "c"):
        engine.add_request(name, None, [40] * 10, greedy(max_tokens=3))
    assert engine.begin_step() is not None
    engine.abort("b")
    engine.fail_step()
    stats = engine.stats()
    assert (stats.num_failed, stats.num_aborted, num_ended(stats)) == (1, 1, 2)
    assert [times.total for times in stats.step_times.values()] == [1, 1, 0]
    assert (stats.queue_times.total, stats.first_token_times.total, stats.end_to_end_times.total) == (2, 0, 0)


def test_a_row_without_a_token_counts_as_failed_and_not_as_a_token() -> None:
    run = Run(make_engine(), NotFinite())
    run.add("bad", "x" * 9, greedy())
    while run.engine.has_unfinished:
        run.step()
    stats = run.engine.stats()
    assert (stats.num_failed, num_ended(stats), stats.num_generated_tokens) == (1, 1, 2)


def test_sums_hold_at_every_moment_under_preemption_and_aborts() -> None:
    dice = random.Random(7)
    engine, executor = make_engine(num_blocks=12), FailingExecutor(lambda number, _: number % 40 == 39)
    num_tokens = 0
    for number in range(400):
        if number % 3 == 0 and number < 300:
            n = dice.choice((1, 1, 2))
            params = SamplingParams(n=n, max_tokens=dice.randint(1, 20), seed=number, ignore_eos=dice.random() < 0.5)
            engine.add_request(str(number), None, [dice.randint(2, 6)] * dice.randint(1, 24), params)
        step = engine.begin_step()
        for request_id in list(engine._requests):
            if dice.random() < 0.01:
                engine.abort(request_id)
        if step is not None:
            try:
                output = executor.execute(step)
            except RuntimeError:
                engine.fail_step()
            else:
                deltas = engine.finish_step(output)
                num_tokens += sum(len(one.token_ids) for delta in deltas for one in delta.outputs)
        stats = engine.stats()
        assert stats.num_accepted == num_ended(stats) + num_open(engine)
    assert min(stats.num_preemptions, stats.num_aborted, stats.num_failed, *stats.num_finished.values()) > 0
    assert stats.num_generated_tokens == num_tokens
    assert stats.end_to_end_times.total == sum(stats.num_finished.values())
    assert stats.end_to_end_times.total <= stats.first_token_times.total <= stats.queue_times.total


async def test_what_is_open_when_the_engine_dies_counts_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    engine = AsyncLLMEngine(make_engine(max_num_seqs=1), FailingExecutor(lambda *_: True))
    engine.start()
    prompts = ["a" * 9, "b" * 16, "c" * 17, "d" * 30, "e"]
    tasks = [collect(engine, prompt, prompt, greedy()) for prompt in prompts]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[-1], EngineDeadError)
    stats = engine.stats()
    assert (stats.num_accepted, stats.num_failed, num_ended(stats)) == (5, 5, 5)
    await engine.stop()
    assert "The engine is dead." in caplog.text


def test_times_begin_with_the_arrival_and_the_queue() -> None:
    engine, executor = make_engine(), FakeExecutor()
    request = engine.prepare("r", None, [40, 41], greedy(max_tokens=2))
    engine.enqueue(request, time.monotonic() - 1000)
    while engine.has_unfinished:
        engine.step(executor)
    stats = engine.stats()
    assert 1000 <= stats.first_token_times.sum_s < stats.end_to_end_times.sum_s
    assert max(stats.queue_times.sum_s, stats.inter_token_times.sum_s) < 100


async def test_tokenising_is_part_of_the_time_to_the_first_token() -> None:
    tokenizer = GatedTokenizer()
    engine = AsyncLLMEngine(LLMEngine(SETTINGS, tokenizer), FakeExecutor())
    engine.start()
    task = asyncio.create_task(collect(engine, "r", "abc", greedy(max_tokens=2)))
    await wait_for(tokenizer.has_begun)
    begin_s = time.monotonic()
    await asyncio.sleep(0.05)
    tokenising_s = time.monotonic() - begin_s
    tokenizer.may_end.set()
    assert len(await task) == 2
    assert engine.stats().first_token_times.sum_s > tokenising_s
    await engine.stop()
