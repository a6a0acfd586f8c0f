"""`LLM`: order, count and reuse (case M6), refusals, failures, Ctrl-C, threads, event loops, the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.checkpoints import byte_tokenizer, cached_checkpoint, copy_checkpoint, reference_greedy
from tests.helpers.engine_fakes import FailingExecutor, FakeExecutor, greedy, make_engine
from tests.helpers.scripted_models import const_model, save_scripted
from tests.helpers.server import REAL, running_server
from tests.helpers.tokenizers import make_tokenizer
from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.entrypoints import llm as llm_module
from vllm_lite.entrypoints.engine_thread import EngineThread
from vllm_lite.errors import EngineDeadError, RequestFailedError, StartupError

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 160, "block_size": 8, "num_threads": 1}
MIXED = [f"{'prompt ' * (index % 7)}{index}" for index in range(29)] + ["prompt 1"]
"""Thirty of mixed length, the last one equal to another."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(cached_checkpoint()), **OPTIONS) as llm:
        yield llm


def fake_llm(monkeypatch: pytest.MonkeyPatch, executor: Any, **changes: Any) -> LLM:
    parts = SimpleNamespace(engine=make_engine(**changes), executor=executor, tokenizer=ByteTokenizer())
    monkeypatch.setattr(llm_module, "build_parts", lambda config: parts)
    return LLM()


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


class SlowExecutor(FakeExecutor):
    """Says when a step has begun, and takes its time."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.has_begun = threading.Event()

    def execute(self, step: StepInput) -> StepOutput:
        self.has_begun.set()
        time.sleep(0.005)
        return super().execute(step)


# The start


@pytest.mark.parametrize("name", ["asyncio.events.new_event_loop", "vllm_lite.entrypoints.llm.AsyncLLMEngine.start"])
def test_what_keeps_the_thread_from_starting_is_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(name, fail)
    with pytest.raises(OSError, match="Too many open files"):
        fake_llm(monkeypatch, FakeExecutor())


# Order, count, reuse


def test_case_m6_one_output_a_prompt_in_their_order_and_again(llm: LLM) -> None:
    params = [greedy(max_tokens=3 + index * 7 % 20) for index in range(30)]
    first, second = llm.generate(MIXED, params), llm.generate(MIXED, params)
    assert [output.prompt for output in first] == MIXED
    assert [len(ids) for ids in token_ids(first)] == [one.max_tokens for one in params]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in first)
    assert (token_ids(first), texts(first)) == (token_ids(second), texts(second))
    assert first[1].request_id != second[1].request_id
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(MIXED, params)]
    assert token_ids(alone) == token_ids(first)
    assert [list(output.prompt_token_ids) for output in first] == [byte_tokenizer()(text).input_ids for text in MIXED]


def test_greedy_equals_hugging_face_and_the_server(llm: LLM) -> None:
    folder, prompts = cached_checkpoint(), ["Hello", "The quick brown fox " * 3, "two words"]
    outputs = llm.generate(prompts, greedy(max_tokens=16))
    expected = [reference_greedy(folder, byte_tokenizer()(prompt).input_ids, 16) for prompt in prompts]
    assert token_ids(outputs) == expected
    assert all(len(set(ids)) > 3 for ids in expected)
    flags = ["--model", str(folder), "--dtype", "float32", "--num-kv-blocks", "160", "--block-size", "8"]
    with running_server(*flags, module=REAL) as server:
        served = [server.text(prompt=prompt, max_tokens=16, temperature=0, ignore_eos=True) for prompt in prompts]
    assert [output.prompt + text for output, text in zip(outputs, texts(outputs)) if output.prompt] == served


FLAT = range(34, 134)
"""The ids that the model of `flat_llm` takes alike, whatever went before; all others are as good as impossible."""


@pytest.fixture(scope="module")
def flat_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tokenizer = make_tokenizer()
    model = const_model(dict.fromkeys(FLAT, 0.0), len(tokenizer), other=-3e38)
    folder = save_scripted(tmp_path_factory.mktemp("flat"), model, tokenizer)
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def test_case_p5_candidates_differ_and_come_again_with_their_seed(flat_llm: LLM) -> None:
    def ids(params: SamplingParams) -> list[list[tuple[int, ...]]]:
        outputs = flat_llm.generate(["abc"] * 4, params)
        return [[tuple(candidate.token_ids) for candidate in output.outputs] for output in outputs]

    seeded = SamplingParams(n=4, seed=7, max_tokens=20)
    first = ids(seeded)
    assert len(set(first[0])) == 4
    assert first == [first[0]] * 4 == ids(seeded), "the same seed, the same tokens"
    assert ids(SamplingParams(seed=7, max_tokens=20))[0] == first[0][:1], "equally good ones keep their places"
    unseeded = [*ids(SamplingParams(n=4, max_tokens=20)), *ids(SamplingParams(n=4, max_tokens=20))]
    assert len({candidate for output in unseeded for candidate in output}) == 32
    with pytest.raises(ValueError, match="best_of must be 1 when using greedy sampling"):
        SamplingParams(n=4, temperature=0)


@pytest.mark.parametrize(
    ("fields", "like"),
    [
        ({"top_k": 0}, {}),
        ({"top_k": -1}, {}),
        ({"top_k": 10**9}, {}),
        ({"top_k": 258}, {}),
        ({"top_p": 1}, {}),
        ({"min_p": 0}, {}),
        ({"n": 1, "best_of": 1}, {}),
        ({"top_k": 1}, {"temperature": 0}),
        ({"top_p": 1e-9}, {"temperature": 0}),
        ({"temperature": 0, "top_k": 0, "top_p": 0.1}, {"temperature": 0}),
        ({"min_p": 1}, {}),
    ],
    ids=str,
)
def test_case_p8_edge_values_are_off_or_greedy(flat_llm: LLM, fields: dict[str, Any], like: dict[str, Any]) -> None:
    """A hundred ids tie at the top: `top_k` 1 takes the one of temperature 0, and `min_p` 1 keeps them all."""
    found, expected = (SamplingParams(**{"seed": 3, "max_tokens": 12, **given}) for given in (fields, like))
    (ids,), (expected_ids,) = (token_ids(flat_llm.generate("abc", params)) for params in (found, expected))
    assert ids == expected_ids
    assert (set(ids) == {FLAT[0]}) == bool(like)


@pytest.mark.parametrize(("fields", "word"), [({"top_p": 0}, "top_p"), ({"n": 2, "best_of": 1}, "best_of")])
def test_case_p8_edge_values_that_mean_nothing_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"^{word} must be"):
        SamplingParams(**fields)


def test_no_parameters_are_the_defaults(llm: LLM) -> None:
    (output,) = llm.generate("Hello")
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_nothing_gives_nothing(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], []) == []
    assert llm.generate(prompt_token_ids=[]) == []
    assert capsys.readouterr().err == ""


def test_token_ids_instead_of_text_and_beside_it(llm: LLM) -> None:
    ids = [llm.get_tokenizer().encode(prompt) for prompt in ("Hello", "other")]
    by_text = llm.generate(["Hello", "other"], greedy())
    by_ids = llm.generate(prompt_token_ids=ids, sampling_params=greedy())
    both = llm.generate(["shown", "only"], greedy(), ids)
    assert token_ids(by_text) == token_ids(by_ids) == token_ids(both)
    assert [output.prompt for output in by_ids] == [None, None]
    assert [output.prompt for output in both] == ["shown", "only"]
    assert [list(output.prompt_token_ids) for output in by_ids] == ids


def test_case_l9_prompts_have_the_ids_of_hugging_face_s_tokenizer(tmp_path: Path) -> None:
    """One that adds BOS: a prompt that begins with it has two, as there; ids that are given get none."""
    folder, tokenizer = copy_checkpoint(cached_checkpoint(), tmp_path / "model"), byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    tokenizer.save_pretrained(folder)
    prompts = ["hi", "</s>hi", ""]
    reference = AutoTokenizer.from_pretrained(folder)
    expected = [reference(prompt).input_ids for prompt in prompts]
    assert [ids[:2].count(1) for ids in expected] == [1, 2, 1]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(prompts, greedy())
        assert [list(output.prompt_token_ids) for output in outputs] == expected
        (given,) = llm.generate(prompt_token_ids=[expected[0][1:]], sampling_params=greedy())
        assert list(given.prompt_token_ids) == expected[0][1:]
        assert token_ids(outputs)[0] == reference_greedy(folder, expected[0], 30)


def test_a_seeded_engine_repeats_itself_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseeded requests draw their seeds in the order of the prompts, whatever tokenising each of them takes."""

    def run() -> list[list[int]]:
        with fake_llm(monkeypatch, FakeExecutor(), seed=0) as llm:
            return token_ids(llm.generate([*MIXED, *["same"] * 4], SamplingParams(max_tokens=12, ignore_eos=True)))

    first = run()
    assert first == run()
    assert len({tuple(ids) for ids in first[-4:]}) == 4


# Refusals


def test_lists_of_different_lengths_are_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params must have one entry for each of 3 prompts, got 2"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)
    with pytest.raises(ValueError, match="prompt_token_ids must have one list for each of 1 prompts, got 2"):
        llm.generate(["a"], None, [[1], [2]])
    with pytest.raises(ValueError, match="for each of 0 prompts, got 1"):
        llm.generate([], [SamplingParams()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "prompts or prompt_token_ids must be given, got neither"),
        ({"prompts": 5}, "prompts must be a list, got int"),
        ({"prompts": {"a": 1}}, "prompts must be a list, got dict"),
        ({"prompts": ["a", b"b"]}, r"prompts\[1\] must be a string, got bytes"),
        ({"prompts": ["a", None]}, r"prompts\[1\] must be a string, got NoneType"),
        ({"prompts": "a", "sampling_params": {"n": 1}}, "sampling_params must be SamplingParams or a list.*got dict"),
        ({"prompts": "a", "sampling_params": [None]}, r"sampling_params\[0\] must be SamplingParams, got NoneType"),
        ({"prompt_token_ids": [1, 2]}, r"prompt_token_ids\[0\] must be a list of integers, got 1"),
        ({"prompt_token_ids": [[1], [2, True]]}, r"prompt_token_ids\[1\] must be a list of integers, got \[2, True\]"),
        ({"prompt_token_ids": [[1], []]}, r"prompt_token_ids\[1\]: prompt must have at least one token"),
        ({"prompt_token_ids": [[1], [256]]}, r"prompt_token_ids\[1\]: prompt must have token ids from 0 to 255.*256"),
        ({"prompt_token_ids": [[2**40]]}, r"prompt_token_ids\[0\]: prompt must have token ids from 0 to 255"),
        ({"prompts": ["a", "x" * 128]}, r"prompts\[1\]: prompt must leave room.*128 tokens.*context holds 128"),
        ({"prompts": ["a", "b", ""]}, r"prompts\[2\]: prompt must have at least one token"),
        ({"prompts": ["a", "\ud800"]}, r"prompts\[1\]: prompt must be valid Unicode"),
        (
            {"prompts": ["a", "b"], "sampling_params": [SamplingParams(), SamplingParams(stop_token_ids=[999])]},
            r"prompts\[1\]: stop_token_ids must hold ids from 0 to 255, got 999",
        ),
    ],
)
def test_what_cannot_be_served_is_named_before_anything_is_computed(
    llm: LLM, arguments: dict[str, Any], message: str
) -> None:
    before = llm._engine.stats()
    with pytest.raises(ValueError, match=message):
        llm.generate(**arguments)
    assert llm._engine.stats() == before
    assert len(llm.generate("a", greedy(max_tokens=2))) == 1


def test_an_unknown_keyword_names_the_nearest_known_one() -> None:
    with pytest.raises(
        StartupError, match="unknown option 'max_model_length'; the nearest known one is 'max_model_len'"
    ):
        LLM(str(cached_checkpoint()), max_model_length=5)


# Failures


def test_a_failed_step_names_its_prompt_and_nothing_more_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    poison = ByteTokenizer().encode("bad!")
    executor = FailingExecutor(lambda number, step: step.token_ids.tolist() == poison)
    with fake_llm(monkeypatch, executor, max_num_seqs=1) as llm:
        for _ in range(5):  # more often than an engine may fail in a row: it is the same prompt
            with pytest.raises(RequestFailedError, match=r"prompts\[1\]: .*the device is on fire"):
                llm.generate(["good", "bad!", "good"], greedy())
        assert_idle(llm)
        assert llm._engine.stats().num_aborted == 5, "the third prompt of each call was not needed any more"
        assert len(token_ids(llm.generate("good", greedy()))[0]) == 30


def test_a_dead_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_llm(monkeypatch, FakeExecutor()) as llm:
        monkeypatch.setattr(llm._engine, "finish_step", lambda output: 1 / 0)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="the log says why") as raised:
                llm.generate("a")
            assert isinstance(raised.value.__cause__, ZeroDivisionError)


# Ctrl-C, threads, event loops


def assert_idle(llm: LLM) -> None:
    """Within a few steps: an abort waits for the one that is being computed."""
    end = time.monotonic() + 10
    while (stats := llm._engine.stats()).num_free_blocks < stats.num_total_blocks:
        assert time.monotonic() < end, stats
        time.sleep(0.005)
    assert stats.num_running == stats.num_waiting == 0


def test_ctrl_c_aborts_what_runs_and_leaves_the_object_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SlowExecutor()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        executor.has_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    try:
        with fake_llm(monkeypatch, executor) as llm:
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b", "c"] * 40, greedy(max_tokens=400))
            assert_idle(llm)
            assert llm._engine.stats().num_aborted > 0
            assert len(token_ids(llm.generate("a", greedy()))[0]) == 30
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, previous)


def test_ctrl_c_between_a_call_s_start_and_the_wait_for_it_aborts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = EngineThread.submit

    def interrupted(thread: EngineThread, call: Any) -> Any:
        submit(thread, call)
        raise KeyboardInterrupt

    with fake_llm(monkeypatch, SlowExecutor()) as llm:
        monkeypatch.setattr(EngineThread, "submit", interrupted)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b"] * 40, greedy(max_tokens=400))
        monkeypatch.setattr(EngineThread, "submit", submit)
        assert_idle(llm)
        assert len(token_ids(llm.generate("a", greedy()))[0]) == 30


def test_calls_of_two_threads_run_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SlowExecutor()
    expected: dict[str, list[list[int]]] = {}
    found: dict[str, list[list[int]]] = {}
    with fake_llm(monkeypatch, executor) as llm:

        def call(word: str, results: dict[str, list[list[int]]]) -> None:
            results[word] = token_ids(llm.generate([word, word * 3], greedy(max_tokens=60)))

        for word in ("one", "two"):
            call(word, expected)
        executor.steps.clear()
        threads = [threading.Thread(target=call, args=(word, found)) for word in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == expected
    assert max(step.shape.num_seqs for step in executor.steps) == 4


async def test_generate_works_where_an_event_loop_runs(llm: LLM) -> None:
    assert token_ids(llm.generate("Hello", greedy())) == token_ids(await llm.generate_async("Hello", greedy()))


async def test_async_calls_run_as_one_batch_beside_the_callers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SlowExecutor()
    with fake_llm(monkeypatch, executor) as llm:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        calls = [llm.generate_async([word, "same"], greedy()) for word in ("a", "b", "c")]
        outputs = await asyncio.gather(*calls)
        ticking.cancel()
    assert [[output.prompt for output in call] for call in outputs] == [[word, "same"] for word in ("a", "b", "c")]
    assert max(step.shape.num_seqs for step in executor.steps) == 6
    assert ticks > 10, "the caller's loop stood still"


async def test_cancelling_an_async_call_aborts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SlowExecutor()
    with fake_llm(monkeypatch, executor) as llm:
        call = asyncio.create_task(llm.generate_async(["a", "b"], greedy(max_tokens=400)))
        await asyncio.to_thread(executor.has_begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert_idle(llm)
        assert llm._engine.stats().num_aborted == 2


async def test_async_calls_raise_what_the_others_do(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt must have at least one token"):
        await llm.generate_async(["a", ""])
    with pytest.raises(ValueError, match="one entry for each of 1 prompts, got 0"):
        await llm.generate_async(["a"], [])


# The end


async def test_a_closed_object_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch, FakeExecutor())
    with llm:
        assert len(llm.generate("a", greedy())) == 1
    llm.close()
    with pytest.raises(EngineDeadError, match="has been closed; make a new one"):
        llm.generate("a")
    with pytest.raises(EngineDeadError, match="has been closed; make a new one"):
        await llm.generate_async("a")


def test_closing_ends_the_calls_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SlowExecutor()
    llm = fake_llm(monkeypatch, executor)

    def close() -> None:
        executor.has_begun.wait()
        llm.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(EngineDeadError, match="stopped"):
        llm.generate(["a", "b"], greedy(max_tokens=400))
    closer.join()


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_nothing_of_the_model_is_kept(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    executor = FakeExecutor()
    llm = fake_llm(monkeypatch, executor)
    llm.generate("a", greedy())
    monkeypatch.undo()
    model, thread = weakref.ref(executor), llm._thread._thread
    del executor
    if ends == "closed":
        llm.close()
    else:
        del llm
    gc.collect()
    assert model() is None
    assert not thread.is_alive()


# What is shown


def test_the_bar_counts_prompts_and_shows_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], greedy(max_tokens=5))
    bar = capsys.readouterr().err.split("\r")[-1]
    assert "Processed prompts: 100%" in bar and "3/3" in bar
    assert re.search(r" \d+\.\d tokens/s\]", bar)
    llm.generate(["a", "b", "c"], greedy(max_tokens=5), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_keywords_without_effect_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = SimpleNamespace(engine=make_engine(), executor=FakeExecutor(), tokenizer=ByteTokenizer())
    monkeypatch.setattr(llm_module, "build_parts", lambda config: parts)
    with caplog.at_level(logging.WARNING, logger="vllm_lite"):
        LLM(swap_space=8, max_paddings=3, engine_use_ray=True, max_log_len=10, disable_log_requests=True).close()
    (record,) = caplog.records
    assert record.getMessage() == "accepted without effect: swap_space, max_paddings, engine_use_ray, max_log_len"


def test_a_relative_folder_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").symlink_to(cached_checkpoint())
    monkeypatch.chdir(tmp_path)
    with LLM(model="model", **OPTIONS) as llm:
        assert len(llm.generate("a", greedy(), use_tqdm=False)) == 1
