"""Many asyncio tasks on one engine: streams, departures at every moment, failures, the end."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace

import pytest

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.engine_fakes import (
    SETTINGS,
    FailingExecutor,
    FakeExecutor,
    Run,
    check_engine,
    greedy,
    make_engine,
)
from vllm_lite.engine.async_llm_engine import (
    MAX_SIZE_IN_A_TURN,
    NUM_DELTAS_AT_ONCE,
    AsyncLLMEngine,
    FailureStreak,
    StatsLog,
)
from vllm_lite.engine.llm_engine import MAX_QUICK_CANDIDATES, MAX_QUICK_SIZE, Executor, LLMEngine
from vllm_lite.engine.step import NO_TOKEN, StepInput, StepOutput
from vllm_lite.errors import EngineDeadError, RequestError, RequestFailedError
from vllm_lite.outputs import RequestDelta, RequestTally
from vllm_lite.sampling_params import SamplingParams

PATIENCE_S = 20.0
PROMPTS = ["a" * 9, "b" * 16, "c" * 17, "d" * 30, "e", "f" * 8]


class GatedExecutor(FakeExecutor):
    """Computes a step only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_end = threading.Semaphore(0)

    def execute(self, step: StepInput) -> StepOutput:
        self.has_begun.set()
        assert self.may_end.acquire(timeout=PATIENCE_S)
        return super().execute(step)


class GatedTokenizer(ByteTokenizer):
    is_quick = False

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return super().encode(text)


@asynccontextmanager
async def running(
    executor: Executor | None = None, engine: LLMEngine | None = None, **changes: object
) -> AsyncGenerator[AsyncLLMEngine, None]:
    async_engine = AsyncLLMEngine(engine or make_engine(**changes), executor or FakeExecutor())
    async_engine.start()
    yield async_engine
    if async_engine.is_alive:
        await wait_until(lambda: async_engine.stats().num_running + async_engine.stats().num_waiting == 0)
        assert async_engine.stats().num_free_blocks == async_engine.stats().num_total_blocks
        check_engine(async_engine._engine)
    await async_engine.stop()


async def wait_until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), PATIENCE_S)


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, PATIENCE_S)


async def collect(
    engine: AsyncLLMEngine, request_id: str, prompt: str, params: SamplingParams, *, is_whole: bool = False
) -> list[RequestDelta]:
    async with aclosing(engine.generate(request_id, prompt, params, is_whole=is_whole)) as deltas:
        return [delta async for delta in deltas]


def ids_of(deltas: list[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.outputs[0].token_ids]


def ids_alone(prompt: str, params: SamplingParams) -> list[int]:
    run = Run(make_engine(), FakeExecutor())
    run.add("r", prompt, params)
    return run.token_ids()["r"]


async def test_streams_give_what_the_engine_gives() -> None:
    async with running(num_blocks=20) as engine:
        tasks = [collect(engine, prompt, prompt, greedy()) for prompt in PROMPTS]
        results = await asyncio.gather(*tasks)
        assert engine.stats().num_preemptions > 0
    for prompt, deltas in zip(PROMPTS, results):
        assert ids_of(deltas) == ids_alone(prompt, greedy())
        assert [delta.finished for delta in deltas] == [False] * 29 + [True]


async def test_the_loop_is_free_while_a_step_is_computed() -> None:
    executor = GatedExecutor()
    async with running(executor) as engine:
        task = asyncio.create_task(collect(engine, "r", "abc", greedy(max_tokens=1)))
        await wait_for(executor.has_begun)
        assert (engine.stats().num_running, engine.is_alive) == (1, True)
        executor.may_end.release()
        assert len(await task) == 1


async def test_prompt_ids_and_admission_are_known_while_a_request_runs() -> None:
    executor = GatedExecutor()
    async with running(executor) as engine:
        begin = time.monotonic()
        task = asyncio.create_task(collect(engine, "r", "abc", greedy(max_tokens=1)))
        assert (list(engine.prompt_token_ids("r")), engine.admission_time_s("r")) == ([], None)
        await wait_for(executor.has_begun)
        assert begin <= (engine.admission_time_s("r") or 0) <= time.monotonic()
        assert list(engine.prompt_token_ids("r")) == ByteTokenizer().encode("abc")
        executor.may_end.release()
        await task
        assert (list(engine.prompt_token_ids("r")), engine.admission_time_s("r")) == ([], None)


async def test_a_refusal_comes_before_the_first_delta() -> None:
    async with running() as engine:
        with pytest.raises(RequestError, match="at least one token"):
            await collect(engine, "r", "", greedy())
        assert ids_of(await collect(engine, "r", "abc", greedy())) == ids_alone("abc", greedy())


async def test_who_leaves_after_a_delta_is_aborted() -> None:
    async with running() as engine:
        async with aclosing(engine.generate("r", "abc", greedy(max_tokens=400))) as deltas:
            await deltas.__anext__()
        assert engine.stats().num_aborted == 1


async def test_who_is_cancelled_during_a_step_is_aborted_at_its_end() -> None:
    executor = GatedExecutor()
    async with running(executor) as engine:
        task = asyncio.create_task(collect(engine, "r", "abc", greedy()))
        await wait_for(executor.has_begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (engine.stats().num_running, engine.stats().num_free_blocks) == (1, 199)
        executor.may_end.release()
        await wait_until(lambda: engine.stats().num_free_blocks == 200)
        assert len(executor.steps) == 1


async def test_who_is_cancelled_while_queued_is_aborted() -> None:
    executor = GatedExecutor()
    async with running(executor, max_num_seqs=1) as engine:
        first = asyncio.create_task(collect(engine, "first", "abc", greedy(max_tokens=2)))
        second = asyncio.create_task(collect(engine, "second", "abc", greedy()))
        await wait_until(lambda: engine.stats().num_waiting == 1 and executor.has_begun.is_set())
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        executor.may_end.release(2)
        assert len(await first) == 2
        assert engine.stats().num_aborted == 1


class WatchedTokenizer(ByteTokenizer):
    """Notes on which threads it tokenises."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def encode_plain(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode_plain(text)


@pytest.mark.parametrize(
    ("prompt", "changes", "is_inline"),
    [
        ("x", {}, True),
        ("x" * MAX_QUICK_SIZE, {}, True),
        ("x" * (MAX_QUICK_SIZE + 1), {}, False),
        ("x", {"bad_words": ["y"]}, False),
        ("x", {"allowed_token_ids": list(range(2, 256)) * 5}, False),
        ("x", {"logit_bias": {token_id: 1.0 for token_id in range(200)}}, True),
        ("x", {"stop_token_ids": [5] * MAX_QUICK_SIZE}, False),
        ("x", {"n": MAX_QUICK_CANDIDATES, "temperature": 1.0}, True),
        ("x", {"n": MAX_QUICK_CANDIDATES + 1, "temperature": 1.0}, False),
    ],
)
async def test_only_what_is_quick_is_tokenised_on_the_event_loop(
    prompt: str, changes: dict[str, object], is_inline: bool
) -> None:
    tokenizer = WatchedTokenizer()
    settings = replace(SETTINGS, max_model_len=2 * MAX_QUICK_SIZE, num_blocks=1000)
    async with running(engine=LLMEngine(settings, tokenizer)) as engine:
        await collect(engine, "r", prompt, greedy(max_tokens=2, **changes))
    assert {thread is threading.current_thread() for thread in tokenizer.threads} == {is_inline}


async def test_prompts_that_come_at_once_share_a_turn_of_the_event_loop() -> None:
    """However short, a thousand of them would hold it up for seconds."""
    tokenizer = WatchedTokenizer()
    settings = replace(SETTINGS, max_model_len=2 * MAX_QUICK_SIZE, num_blocks=1000)
    prompts = ["x" * MAX_QUICK_SIZE] * 20
    async with running(engine=LLMEngine(settings, tokenizer)) as engine:
        for num_rounds in (1, 2):
            tasks = [collect(engine, str(index), prompt, greedy(max_tokens=2)) for index, prompt in enumerate(prompts)]
            await asyncio.gather(*tasks)
            num_inline = tokenizer.threads.count(threading.current_thread())
            assert num_inline * MAX_QUICK_SIZE == num_rounds * MAX_SIZE_IN_A_TURN
    assert len(tokenizer.threads) == 2 * len(prompts)


async def test_who_wants_the_whole_is_seldom_woken() -> None:
    params = greedy(max_tokens=70)
    async with running() as engine:
        num_unread: list[int] = []
        async with aclosing(engine.generate("r", "abc", params, is_whole=True)) as deltas:
            whole = []
            async for delta in deltas:
                whole.append(delta)
                num_unread.append(len(engine._streams["r"]._items))
        assert num_unread[0] >= NUM_DELTAS_AT_ONCE - 1
        assert [ids_of([delta]) for delta in whole] == [[one] for one in ids_alone("abc", params)]


async def test_who_wants_the_whole_is_told_of_its_end_at_once() -> None:
    executor = GatedExecutor()
    async with running(executor) as engine:
        task = asyncio.create_task(collect(engine, "r", "abc", greedy(), is_whole=True))
        executor.may_end.release()
        await wait_until(lambda: engine.stats().num_generated_tokens == 1)
        engine.abort("r")
        *_, last = await asyncio.wait_for(task, PATIENCE_S)
        assert last.finished and last.outputs[0].finish_reason == "abort"
        executor.may_end.release()


async def test_who_is_cancelled_while_tokenising_never_arrives() -> None:
    tokenizer = GatedTokenizer()
    async with running(engine=LLMEngine(SETTINGS, tokenizer)) as engine:
        task = asyncio.create_task(collect(engine, "r", "abc", greedy()))
        await wait_for(tokenizer.has_begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        tokenizer.may_end.set()
        assert len(await collect(engine, "r", "abc", greedy(max_tokens=3))) == 3
        assert engine.stats().num_aborted == 0


@pytest.mark.parametrize("seed", range(3))
async def test_departures_at_random_moments_leave_nothing_behind(seed: int) -> None:
    dice = random.Random(seed)

    async def visit(engine: AsyncLLMEngine, number: int) -> None:
        await asyncio.sleep(dice.random() * 0.1)
        task = collect(engine, str(number), "x" * dice.randrange(1, 40), greedy(max_tokens=dice.randrange(1, 60)))
        try:
            await asyncio.wait_for(task, dice.choice([0.001, 0.01, 0.05, PATIENCE_S]))
        except asyncio.TimeoutError:
            return

    async with running(num_blocks=20, max_num_batched_tokens=16, max_num_seqs=8) as engine:
        await asyncio.gather(*(visit(engine, number) for number in range(64)))
        assert not engine._streams and engine._is_idle.is_set()


@pytest.mark.parametrize("seed", range(3))
async def test_what_readers_are_told_at_their_ends_adds_up_to_the_counters(seed: int) -> None:
    dice = random.Random(seed)
    tallies: list[RequestTally] = []

    async def read(engine: AsyncLLMEngine, number: int) -> None:
        beams = replace(greedy(max_tokens=8), n=2, use_beam_search=True)
        params = dice.choice(
            [greedy(max_tokens=dice.randrange(1, 60)), SamplingParams(n=3, seed=7, max_tokens=6), beams]
        )
        deltas = engine.generate(str(number), "x" * dice.randrange(1, 40), params, on_end=tallies.append)
        with suppress(RequestFailedError):
            async with aclosing(deltas):
                async for _ in deltas:
                    pass

    async def visit(engine: AsyncLLMEngine, number: int) -> None:
        await asyncio.sleep(dice.random() * 0.1)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(engine, number), dice.choice([0.001, 0.01, 0.05, PATIENCE_S]))

    executor = FailingExecutor(lambda number, _: number in (20, 40))
    async with running(executor, num_blocks=40, max_num_batched_tokens=16, max_num_seqs=8) as engine:
        await asyncio.gather(*(visit(engine, number) for number in range(96)))
        stats = engine.stats()
    outcomes = Counter(tally.outcome for tally in tallies)
    assert len(tallies) == stats.num_accepted
    assert stats.num_finished == {"stop": outcomes["stop"], "length": outcomes["length"]}
    assert (stats.num_aborted, stats.num_failed) == (outcomes["abort"], outcomes["failed"])
    assert min(outcomes["length"], outcomes["abort"], outcomes["failed"]) > 0
    assert sum(tally.num_generated_tokens for tally in tallies) == stats.num_generated_tokens
    assert sum(tally.num_prompt_tokens for tally in tallies) == stats.num_prompt_tokens
    assert sum(tally.admission_time_s is not None for tally in tallies) == stats.queue_times.total


async def test_a_failing_step_fails_its_requests_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    executor = FailingExecutor(lambda number, _: number == 2)
    async with running(executor, max_num_seqs=2) as engine:
        tasks = [collect(engine, prompt, prompt, greedy()) for prompt in PROMPTS[:4]]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.is_alive
    for result in results[:2]:
        assert isinstance(result, RequestFailedError) and "on fire" in str(result.__cause__)
        assert "on fire" not in str(result), "a client is told nothing of the insides"
    for prompt, result in zip(PROMPTS[2:], results[2:]):
        assert isinstance(result, list) and ids_of(result) == ids_alone(prompt, greedy())
    assert "A step failed, and with it the requests" in caplog.text and "Traceback" in caplog.text


async def test_one_poisonous_prompt_never_kills_the_engine() -> None:
    async with running(FailingExecutor(lambda _, step: step.shape.num_tokens == 5)) as engine:
        for number in range(10):
            with pytest.raises(RequestFailedError):
                await collect(engine, str(number), "12345", greedy())
        assert engine.is_alive
        assert len(await collect(engine, "good", "1234", greedy())) == 30


class Exhausted(FakeExecutor):
    def execute(self, step: StepInput) -> StepOutput:
        raise StopIteration


async def test_an_error_that_no_future_can_hold_fails_the_request_like_any_other() -> None:
    async with running(Exhausted()) as engine:
        with pytest.raises(RequestFailedError) as raised:
            await asyncio.wait_for(collect(engine, "r", "abc", greedy()), PATIENCE_S)
        assert "StopIteration" in str(raised.value.__cause__)
        assert engine.is_alive


class Panic(BaseException):
    """As a library in Rust raises it."""


class BrokenTokenizer(ByteTokenizer):
    def __init__(self, error: BaseException, *, is_quick: bool) -> None:
        super().__init__()
        self.error = error
        self.is_quick = is_quick

    def encode(self, text: str) -> list[int]:
        if text == "bad":
            raise self.error
        return super().encode(text)


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(
    "error", [KeyError("insides"), MemoryError("insides"), StopIteration("insides"), Panic("insides")]
)
async def test_a_tokenizer_that_raises_fails_the_request_and_no_other(
    error: BaseException, is_quick: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(engine=LLMEngine(SETTINGS, BrokenTokenizer(error, is_quick=is_quick))) as engine:
        good = asyncio.create_task(collect(engine, "good", "abc", greedy()))
        with pytest.raises(RequestFailedError, match="could not be tokenised") as raised:
            await asyncio.wait_for(collect(engine, "r", "bad", greedy()), PATIENCE_S)
        assert "insides" not in str(raised.value) and "insides" in str(raised.value.__cause__)
        assert len(await good) == 30
    assert "Request r failed" in caplog.text and "insides" in caplog.text and "Traceback" in caplog.text


class BrokenDecoder(ByteTokenizer):
    """Cannot decode what follows on "bad"."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def decode(self, token_ids: Sequence[int], **flags: bool) -> str:
        text = super().decode(token_ids, **flags)
        if "bad" in text and not text.endswith("bad"):
            raise self.error
        return text


@pytest.mark.parametrize("error", [KeyError("insides"), Panic("insides")])
@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        SamplingParams(n=3, seed=1, max_tokens=30, ignore_eos=True),
        SamplingParams(use_beam_search=True, best_of=2, temperature=0, max_tokens=30),
    ],
    ids=["greedy", "candidates", "beams"],
)
async def test_a_token_that_cannot_be_decoded_fails_the_request_and_no_other(
    params: SamplingParams, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(engine=LLMEngine(SETTINGS, BrokenDecoder(error))) as engine:
        good = asyncio.create_task(collect(engine, "good", "abc", greedy()))
        with pytest.raises(RequestFailedError, match="could not decode") as raised:
            await asyncio.wait_for(collect(engine, "r", "bad", params), PATIENCE_S)
        assert "insides" not in str(raised.value) and "insides" in str(raised.value.__cause__)
        assert len(await good) == 30
        stats = engine.stats()
        assert (stats.num_failed, stats.num_free_blocks) == (1, stats.num_total_blocks)
    assert "Request r failed" in caplog.text and "insides" in caplog.text


async def test_the_same_error_for_all_prompts_kills_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with running(FailingExecutor(lambda *_: True), max_num_seqs=1) as engine:
        tasks = [collect(engine, prompt, prompt, greedy()) for prompt in PROMPTS]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [RequestFailedError] * 3 + [EngineDeadError] * 3
        assert not engine.is_alive
        with pytest.raises(EngineDeadError) as raised:
            await collect(engine, "late", "abc", greedy())
        assert "3 steps in a row failed" in str(raised.value.__cause__)
        assert engine.stats().num_total_blocks == 200
    assert "The engine is dead." in caplog.text


@pytest.mark.parametrize("method", ["begin_step", "finish_step"])
async def test_a_bug_of_our_own_kills_the_engine(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner = make_engine()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(inner, method, broken)
    async with running(engine=inner) as engine:
        tasks = [collect(engine, prompt, prompt, greedy()) for prompt in PROMPTS]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) and "a bug" in str(result.__cause__) for result in results)
        assert not any("a bug" in str(result) for result in results), "a client is told nothing of the insides"
        assert len(set(map(id, results))) == len(PROMPTS), "each task raises an error of its own"
        assert not engine.is_alive
    assert "ZeroDivisionError" in caplog.text


class NotFinite(FakeExecutor):
    def choose(self, step: StepInput, row: int, context: list[int]) -> int:  # type: ignore[override]
        return NO_TOKEN if len(context) == 11 else super().choose(step, row, context)


async def test_a_row_without_a_token_fails_its_request() -> None:
    async with running(NotFinite()) as engine:
        good, bad = await asyncio.gather(
            collect(engine, "good", "x" * 12, greedy()),
            collect(engine, "bad", "x" * 9, greedy()),
            return_exceptions=True,
        )
        assert isinstance(good, list) and len(good) == 30
        assert isinstance(bad, RequestFailedError) and "no finite number" in str(bad)


async def test_draining_waits_for_what_runs() -> None:
    async with running() as engine:
        task = asyncio.create_task(collect(engine, "r", "abc", greedy()))
        await wait_until(lambda: engine.stats().num_running == 1)
        await engine.drain(PATIENCE_S)
        assert len(await task) == 30
        await engine.drain(PATIENCE_S)


async def test_draining_ends_cleanly_what_takes_too_long() -> None:
    executor, tokenizer = GatedExecutor(), GatedTokenizer()
    tokenizer.may_end.set()
    async with running(executor, LLMEngine(replace(SETTINGS, max_num_seqs=1), tokenizer)) as engine:
        running_task = asyncio.create_task(collect(engine, "runs", "abc", greedy()))
        await wait_for(executor.has_begun)
        queued = asyncio.create_task(collect(engine, "queued", "abc", greedy()))
        await wait_until(lambda: engine.stats().num_waiting == 1)
        tokenizer.may_end.clear()
        tokenizer.has_begun.clear()
        tokenising = asyncio.create_task(collect(engine, "tokenising", "abc", greedy()))
        await wait_for(tokenizer.has_begun)
        await engine.drain(0.01)
        tokenizer.may_end.set()
        for task in (running_task, queued, tokenising):
            (delta,) = await task
            assert delta.finished and delta.outputs[0].finish_reason == "abort"
        executor.may_end.release()


async def test_stopping_ends_what_is_open() -> None:
    executor = GatedExecutor()
    engine = AsyncLLMEngine(make_engine(), executor)
    engine.start()
    task = asyncio.create_task(collect(engine, "r", "abc", greedy()))
    await wait_for(executor.has_begun)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    assert not engine.is_alive
    executor.may_end.release()
    await stopping
    with pytest.raises(EngineDeadError, match="stopped"):
        await task
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("execute")]


async def test_a_step_that_does_not_end_can_be_seen_and_given_up() -> None:
    executor = GatedExecutor()
    engine = AsyncLLMEngine(make_engine(max_num_seqs=2), executor)
    engine.start()
    assert engine.step_time_s is None
    tasks = [asyncio.create_task(collect(engine, prompt, prompt, greedy())) for prompt in PROMPTS[:4]]
    await wait_for(executor.has_begun)
    await wait_until(lambda: (engine.step_time_s or 0) > 0.01)
    tasks.pop().cancel()  # a client that leaves meanwhile
    await wait_until(lambda: engine.stats().num_aborted == 1)
    engine.declare_dead("no hope")
    assert not engine.is_alive
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(result, EngineDeadError) and str(result) == "no hope" for result in results)
    with pytest.raises(EngineDeadError, match="no hope"):
        await collect(engine, "late", "abc", greedy())
    await asyncio.wait_for(engine.drain(PATIENCE_S), 1)
    await asyncio.wait_for(engine.stop(), 1)
    assert engine.step_time_s is not None
    stats = engine.stats()
    assert (stats.num_accepted, stats.num_aborted, stats.num_failed) == (4, 1, 3)
    executor.may_end.release()
    await wait_until(lambda: engine.step_time_s is None)
    assert engine.stats() == stats, "what comes too late is not looked at"


async def test_stopping_is_released_from_a_step_that_does_not_end() -> None:
    executor = GatedExecutor()
    engine = AsyncLLMEngine(make_engine(), executor)
    engine.start()
    task = asyncio.create_task(collect(engine, "r", "abc", greedy()))
    await wait_for(executor.has_begun)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    engine.declare_dead("no hope")
    await asyncio.wait_for(stopping, 1)
    with pytest.raises(EngineDeadError, match="no hope"):
        await task
    executor.may_end.release()
    await wait_until(lambda: engine.step_time_s is None)


async def test_an_engine_that_was_not_started_serves_nothing() -> None:
    engine = AsyncLLMEngine(make_engine(), FakeExecutor())
    assert not engine.is_alive
    with pytest.raises(EngineDeadError, match="does not run"):
        await collect(engine, "r", "abc", greedy())
    await engine.stop()


def test_a_streak_needs_the_same_error_and_other_prompts() -> None:
    streak = FailureStreak()
    streak.add(RuntimeError("a"), {1})
    streak.add(RuntimeError("a"), {1, 2})
    assert streak.length == 1, "prompt 1 may be the poison"
    streak.add(RuntimeError("a"), {3})
    assert streak.length == 2
    streak.add(RuntimeError("a"), set())
    assert streak.length == 2, "nobody is left to tell by"
    streak.add(RuntimeError("b"), {4})
    assert streak.length == 1
    streak.add(ValueError("b"), {5})
    assert streak.length == 1
    streak.add(ValueError("b"), {6})
    assert streak.length == 2
    streak.end()
    assert streak.length == 0


def test_statistics_come_every_ten_seconds_under_load(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm_lite.engine.async_llm_engine")
    run = Run(make_engine(), FakeExecutor())
    log = StatsLog(run.engine)
    run.add("r", "x" * 20, greedy(max_tokens=25))
    log.log_if_due(1000.0)
    for second in range(1, 25):
        run.step()
        log.log_if_due(1000.0 + second)
    assert [record.getMessage() for record in caplog.records] == [
        "Running 1, waiting 0, prompt 2.0 tokens/s, generation 1.0 tokens/s, KV cache 2.0 % used, prefix hits 0.0 %, "
        "preemptions 0.",
        "Running 1, waiting 0, prompt 0.0 tokens/s, generation 1.0 tokens/s, KV cache 2.5 % used, prefix hits 0.0 %, "
        "preemptions 0.",
    ]
    caplog.clear()
    log.log_if_due(2000.0)
    assert not caplog.records, "rates do not count idle time"


async def test_statistics_can_be_switched_off() -> None:
    engine = AsyncLLMEngine(make_engine(), FakeExecutor(), log_stats=False)
    engine.start()
    assert len(await collect(engine, "r", "abc", greedy(max_tokens=2))) == 2
    await engine.stop()
