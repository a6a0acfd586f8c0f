"""Requests with several candidates: sampling, beam search, logprobs; how they share blocks and what readers see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.engine_fakes import EOS, STOP, FakeExecutor, Run, check_engine, greedy, make_engine
from vllm_lite.engine import block_manager
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.errors import RequestError
from vllm_lite.outputs import OutputAccumulator, RequestOutput
from vllm_lite.sampling_params import SamplingParams

PROMPT = "a prompt of more than a block"
PROMPT_IDS = ByteTokenizer().encode(PROMPT)


def sampling(n: int, **changes: object) -> SamplingParams:
    fields: dict[str, object] = {"n": n, "seed": 7, "ignore_eos": True, "max_tokens": 20, **changes}
    return SamplingParams(**fields)  # type: ignore[arg-type]


def beams(width: int, **changes: object) -> SamplingParams:
    fields: dict[str, object] = {"n": width, "use_beam_search": True, "temperature": 0.0, "max_tokens": 12, **changes}
    return SamplingParams(**fields)  # type: ignore[arg-type]


def outcome(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(o.text, tuple(o.token_ids), o.cumulative_logprob, o.finish_reason) for o in output.outputs]


def run_alone(params: SamplingParams, prompt: str = PROMPT, **changes: object) -> RequestOutput:
    run = Run(make_engine(**changes), FakeExecutor())
    run.add("alone", prompt, params)
    return run.finish()["alone"]


def test_candidates_are_those_of_single_requests_with_their_seeds() -> None:
    whole = run_alone(sampling(4))
    assert len({tuple(output.token_ids) for output in whole.outputs}) == 4
    assert tuple(run_alone(sampling(1)).outputs[0].token_ids) in {tuple(output.token_ids) for output in whole.outputs}
    assert outcome(run_alone(sampling(4))) == outcome(whole)
    assert outcome(run_alone(sampling(4, seed=8))) != outcome(whole)


def test_the_best_n_of_best_of_come_in_the_order_of_their_logprobs() -> None:
    everyone = run_alone(sampling(6))
    logprobs = [output.cumulative_logprob for output in everyone.outputs]
    assert logprobs == sorted(logprobs, key=lambda logprob: -(logprob or 0.0))
    assert outcome(run_alone(sampling(2, best_of=6))) == outcome(everyone)[:2]
    assert [output.index for output in everyone.outputs] == list(range(6))


def test_every_message_shows_the_best_so_far() -> None:
    run = Run(make_engine(), FakeExecutor())
    run.add("r", PROMPT, sampling(2, best_of=5))
    orders = set()
    while run.engine.has_unfinished:
        run.step()
        outputs = run.outputs["r"].output().outputs
        sums = {index: run.outputs["r"]._candidates._scores[index] for index in range(5)}
        assert [output.cumulative_logprob for output in outputs] == sorted(sums.values(), reverse=True)[:2]
        orders.add(tuple(sorted(sums, key=lambda index: -sums[index])[:2]))
    assert len(orders) > 1, "the order has changed on the way"


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    engine, executor = make_engine(enable_prefix_caching=False), FakeExecutor()
    engine.add_request("r", None, [40] * 20, sampling(4))
    engine.step(executor)
    assert executor.steps[0].shape.num_tokens == 20 and executor.steps[0].shape.num_rows == 4
    stats = engine.stats()
    assert stats.num_total_blocks - stats.num_free_blocks == 3
    engine.step(executor)
    assert executor.steps[1].shape.num_tokens == 4
    assert len(executor.steps[1].copy_sources) == 3, "the last block is copied for all but one"
    stats = engine.stats()
    assert stats.num_total_blocks - stats.num_free_blocks == 2 + 4
    check_engine(engine)


def test_candidates_end_one_by_one_and_free_their_blocks() -> None:
    run = Run(make_engine(enable_prefix_caching=False), FakeExecutor())
    run.add("r", PROMPT, sampling(12, ignore_eos=False, stop_token_ids=list(range(2, 60)), max_tokens=40))
    output = run.finish()["r"]
    assert {o.finish_reason for o in output.outputs} == {"stop"} and len({len(o.token_ids) for o in output.outputs}) > 2


@pytest.fixture(params=[False, True], ids=["hash", "colliding hash"])
def any_hash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(block_manager, "hash_block", lambda parent_hash, token_ids: 7)


MIXED: list[SamplingParams] = [
    sampling(3),
    beams(3, ignore_eos=True),
    greedy(max_tokens=20),
    sampling(2, best_of=4, logprobs=2, prompt_logprobs=1),
    beams(4, length_penalty=0.5, early_stopping=True, stop_token_ids=[STOP, 50, 60, 70]),
    greedy(max_tokens=20, logprobs=3),
]


@pytest.mark.parametrize("has_prefix_caching", [True, False])
@pytest.mark.parametrize("changes", [{"num_blocks": 28}, {"max_num_batched_tokens": 5, "num_blocks": 30}, {}])
def test_neither_neighbours_nor_pressure_change_anything(changes: dict[str, object], has_prefix_caching: bool) -> None:
    prompts = [PROMPT[index:] + "x" * index for index in range(len(MIXED))]
    expected = [outcome(run_alone(params, prompt)) for params, prompt in zip(MIXED, prompts)]
    run = Run(make_engine(enable_prefix_caching=has_prefix_caching, **changes), FakeExecutor())
    for index, (params, prompt) in enumerate(zip(MIXED, prompts)):
        run.add(str(index), prompt, params)
    outputs = run.finish()
    assert [outcome(outputs[str(index)]) for index in range(len(MIXED))] == expected
    if "num_blocks" in changes and "max_num_batched_tokens" not in changes:
        assert run.engine.stats().num_preemptions > 0


def test_beams_of_whom_some_have_to_be_computed_again_wait_for_each_other() -> None:
    expected = outcome(run_alone(beams(4, ignore_eos=True, max_tokens=30)))
    run = Run(make_engine(num_blocks=34, max_num_batched_tokens=7, enable_prefix_caching=False), FakeExecutor())
    run.add("older", PROMPT * 3, greedy(max_tokens=60))
    run.add("beams", PROMPT, beams(4, ignore_eos=True, max_tokens=30))
    run.add("younger", PROMPT[::-1], greedy(max_tokens=60))
    assert outcome(run.finish()["beams"]) == expected


@pytest.mark.usefixtures("any_hash")
@pytest.mark.parametrize("params", [sampling(3), beams(3, ignore_eos=True)], ids=["sampled", "beams"])
def test_case_m4_candidates_behind_a_shared_prefix(params: SamplingParams) -> None:
    """In the same step, one after the other, and once the blocks have been taken by others."""
    prompts = [f"a prefix of twenty-four {index}" for index in range(6)] + ["x" * 5 + "a prefix of twenty-four "]
    expected = [outcome(run_alone(params, prompt, enable_prefix_caching=False)) for prompt in prompts]
    engine, executor = make_engine(num_blocks=60), FakeExecutor()
    for num_steps_between in (0, 30, 2):
        run = Run(engine, executor)
        for prompt in prompts:
            run.add(prompt, prompt, params)
            for _ in range(num_steps_between):
                run.step()
        assert [outcome(output) for output in run.finish().values()] == expected
        others = Run(engine, executor)
        others.add("evicts", "y" * 450, greedy(max_tokens=5))
        others.finish()
    assert engine.stats().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("num_blocks", [4, 5, 8, 13])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("make", [sampling, beams], ids=["sampled", "beams"])
def test_case_m1_candidates_that_outgrow_the_whole_cache_end(
    make: Callable[..., SamplingParams], n: int, num_blocks: int
) -> None:
    """A prompt that leaves no room for all of them is refused, and who is served ends; the next one always answers."""
    for prompt_len in range(1, num_blocks * 8 + 1, 3):
        run = Run(make_engine(num_blocks=num_blocks, max_num_seqs=4), FakeExecutor())
        params = make(n, ignore_eos=True, max_tokens=None)
        longest = num_blocks // n * 8
        if prompt_len >= longest:
            with pytest.raises(RequestError, match=f"{prompt_len} tokens and the KV cache holds {longest}"):
                run.add("long", "x" * prompt_len, params)
            run.outputs.pop("long", None)
        else:
            run.add("long", "x" * prompt_len, params)
        run.add("next", "hi", greedy(max_tokens=2))
        outputs = run.finish()
        assert len(outputs["next"].outputs[0].token_ids) == 2
        if "long" in outputs:
            assert len(outputs["long"].outputs) == n
            for output in outputs["long"].outputs:
                assert (output.finish_reason, prompt_len + len(output.token_ids)) == ("length", longest)


class Scores:
    """All continuations of a prompt, scored by the fake's own distribution."""

    def __init__(self) -> None:
        self._executor = FakeExecutor()

    def logprob(self, ids: Sequence[int]) -> float:
        return sum(
            float(self._executor.distribution([*PROMPT_IDS, *ids[:index]])[token_id])
            for index, token_id in enumerate(ids)
        )


@pytest.mark.parametrize("width", [2, 5])
def test_beams_have_the_sums_of_their_tokens_logprobs(width: int) -> None:
    scores = Scores()
    for output in run_alone(beams(width, ignore_eos=True, logprobs=2)).outputs:
        assert output.cumulative_logprob == pytest.approx(scores.logprob(output.token_ids), abs=1e-4)
        assert output.logprobs is not None
        chosen = [entry[token_id] for entry, token_id in zip(output.logprobs, output.token_ids)]
        assert sum(chosen) == pytest.approx(output.cumulative_logprob, abs=1e-4)
        assert all(2 <= len(entry) <= 3 for entry in output.logprobs)


def test_beams_that_are_wide_enough_find_the_best_continuation_there_is() -> None:
    executor = FakeExecutor()
    executor.vocab_size = 6
    engine = make_engine(vocab_size=6, eos_token_ids=frozenset({EOS}))
    engine.add_request("r", None, [3, 4, 5], beams(36, n=1, best_of=36, max_tokens=3, length_penalty=0.0))
    output = OutputAccumulator("r", None, [])
    while engine.has_unfinished:
        for delta in engine.step(executor):
            output.add(delta)

    def score(ids: Sequence[int]) -> float:
        return sum(float(executor.distribution([3, 4, 5, *ids[:i]])[token]) for i, token in enumerate(ids))

    finished = [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in itertools.product(range(6), repeat=3)]
    assert tuple(output.output().outputs[0].token_ids) == max(finished, key=score)


def test_beams_end_at_stop_ids_and_stop_strings_and_lengths() -> None:
    ends = run_alone(beams(5, stop_token_ids=list(range(40, 90)), stop=[chr(100)], max_tokens=6, ignore_eos=True))
    assert {output.finish_reason for output in ends.outputs} <= {"stop", "length"}
    for output in ends.outputs:
        ids = list(output.token_ids)
        assert not any(40 <= token_id < 90 for token_id in ids[:-1])
        if output.finish_reason == "length":
            assert len(ids) == 6
    wide = run_alone(beams(8, stop=["a", "b", "c", "d", "e", "f"], max_tokens=30, ignore_eos=True))
    assert any(isinstance(output.stop_reason, str) for output in wide.outputs)


def test_min_tokens_and_bans_hold_in_beam_search() -> None:
    output = run_alone(beams(4, min_tokens=5, stop_token_ids=list(range(100)), max_tokens=9))
    assert all(len(o.token_ids) >= 5 for o in output.outputs)
    assert all(token_id >= 100 for o in output.outputs for token_id in list(o.token_ids)[:4])


def test_a_stream_of_beams_ends_in_the_answer_and_never_shows_more_than_n() -> None:
    run = Run(make_engine(), FakeExecutor())
    run.add("r", PROMPT, beams(2, best_of=6, stop_token_ids=list(range(40, 60))))
    while run.engine.has_unfinished:
        run.step()
        texts = run.outputs["r"].texts()
        assert len(texts) == 2
    answer = run_alone(beams(2, best_of=6, stop_token_ids=list(range(40, 60))))
    assert texts == [output.text for output in answer.outputs]
    assert all(output.finish_reason in ("stop", "length") for output in answer.outputs)


def test_logprobs_are_the_distributions() -> None:
    executor = FakeExecutor()
    output = run_alone(greedy(max_tokens=4, logprobs=3, prompt_logprobs=2)).outputs[0]
    assert output.logprobs is not None
    for index, (token_id, entry) in enumerate(zip(output.token_ids, output.logprobs)):
        table = executor.distribution([*PROMPT_IDS, *output.token_ids[:index]])
        best = np.argsort(-table, kind="stable")[:3].tolist()
        assert list(entry) == list(dict.fromkeys([token_id, *best]))
        assert all(entry[id_] == table[id_] for id_ in entry)
    assert output.cumulative_logprob == pytest.approx(
        sum(entry[token_id] for entry, token_id in zip(output.logprobs, output.token_ids))
    )


@pytest.mark.parametrize("budget", [3, 8, 256])
@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_come_once_whatever_the_chunks(budget: int, count: int) -> None:
    executor = FakeExecutor()
    run = Run(make_engine(max_num_batched_tokens=budget), executor)
    run.add("before", PROMPT, greedy(max_tokens=2))
    run.add("r", PROMPT, greedy(max_tokens=3, prompt_logprobs=count))
    logprobs = run.finish()["r"].prompt_logprobs
    assert logprobs is not None and logprobs[0] is None and len(logprobs) == len(PROMPT_IDS)
    for position, entry in enumerate(logprobs[1:], start=1):
        table = executor.distribution(PROMPT_IDS[:position])
        best = np.argsort(-table, kind="stable")[:count].tolist()
        assert entry == {token_id: table[token_id] for token_id in dict.fromkeys([PROMPT_IDS[position], *best])}
    assert [delta.prompt_logprobs is not None for delta in run.deltas["r"]] == [True, False, False]


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    output = run_alone(greedy(max_tokens=2))
    assert output.prompt_logprobs is None
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    candidate = run_alone(sampling(2)).outputs[0]
    assert candidate.logprobs is None and candidate.cumulative_logprob is not None


class PoisonedExecutor(FakeExecutor):
    """Gives a NaN instead of one kind of logprobs."""

    def execute(self, step: StepInput) -> StepOutput:
        output = super().execute(step)
        if len(step.scoring.token_ids):
            output = replace(output, scores=replace(output.scores, of_tokens=output.scores.of_tokens * np.nan))
        return output


def test_logprobs_that_are_not_finite_fail_their_request_only() -> None:
    engine, executor = make_engine(), PoisonedExecutor()
    engine.add_request("poisoned", None, PROMPT_IDS, greedy(prompt_logprobs=0))
    engine.add_request("well", None, PROMPT_IDS, greedy(max_tokens=1))
    assert [delta.request_id for delta in engine.step(executor)] == ["well"]
    assert list(engine.take_failures()) == ["poisoned"]
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


@pytest.mark.parametrize("params", [sampling(4), beams(4, ignore_eos=True)])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("in_flight", [True, False])
def test_aborts_end_all_candidates_and_free_all_blocks(params: SamplingParams, num_steps: int, in_flight: bool) -> None:
    engine, executor = make_engine(), FakeExecutor()
    engine.add_request("r", PROMPT, PROMPT_IDS, params)
    output = OutputAccumulator("r", PROMPT, PROMPT_IDS, params.n)
    for _ in range(num_steps):
        for delta in engine.step(executor):
            output.add(delta)
    step = engine.begin_step() if in_flight else None
    last = engine.abort("r")
    assert last is not None and last.finished
    output.add(last)
    if step is not None:
        assert engine.finish_step(executor.execute(step)) == []
    check_engine(engine)
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    assert {candidate.finish_reason for candidate in output.output().outputs} == {"abort"}


@pytest.mark.parametrize("seed", range(3))
def test_random_mixes_leave_nothing_behind(seed: int) -> None:
    random = np.random.default_rng(seed)
    engine: LLMEngine = make_engine(num_blocks=40, max_num_seqs=10, max_num_batched_tokens=12)
    executor = FakeExecutor()
    kinds: list[Callable[[int], SamplingParams]] = [
        lambda n: sampling(n, max_tokens=int(random.integers(1, 12)), logprobs=1),
        lambda n: beams(max(n, 2), max_tokens=int(random.integers(1, 12)), prompt_logprobs=1),
        lambda n: greedy(max_tokens=int(random.integers(1, 12))),
    ]
    for number in range(150):
        if random.random() < 0.4:
            params = kinds[random.integers(3)](int(random.integers(1, 5)))
            ids = random.integers(2, 6, size=int(random.integers(1, 25))).tolist()
            engine.add_request(str(number), None, ids, params)
        if engine._requests and random.random() < 0.1:
            engine.abort(str(random.choice(list(engine._requests))))
        for delta in engine.step(executor):
            assert all(math.isfinite(output.score) for output in delta.outputs)
        check_engine(engine)
    while engine.has_unfinished:
        engine.step(executor)
        check_engine(engine)
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    assert not engine._beams


def test_beams_that_lack_only_their_last_tokens_go_on_at_once() -> None:
    """All but these are in blocks that are still there, so that nothing is left to be computed before them."""
    params = beams(3, ignore_eos=True, max_tokens=20)
    expected = outcome(run_alone(params))
    run = Run(make_engine(), FakeExecutor())
    run.add("r", PROMPT, params)
    request = run.engine._requests["r"]
    while request.sequences[0].num_tokens % 8 != 1 or request.sequences[0].num_output_tokens < 9:
        run.step()
    assert len(request.sequences) == 3
    run.engine._scheduler._preempt(request)
    run.step()
    assert run.executor.steps[-1].shape.num_tokens == 3
    assert outcome(run.finish()["r"]) == expected


@pytest.mark.parametrize("length_penalty", [1e308, -1e308, 1e-300, 400.0, -400.0])
def test_extreme_length_penalties_leave_scores_finite(length_penalty: float) -> None:
    run = Run(make_engine(), FakeExecutor())
    run.add("r", PROMPT, beams(3, length_penalty=length_penalty, stop_token_ids=list(range(60)), max_tokens=8))
    while run.engine.has_unfinished:
        for delta in run.engine.step(run.executor):
            assert all(math.isfinite(output.score) for output in delta.outputs)
