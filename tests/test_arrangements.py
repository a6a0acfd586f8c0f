"""The same tokens however requests are arranged: alone, together, staggered, chunked, preempted, sharing prefixes.

On a real model in float32, through the whole engine (cases M2, M3, M4, P4). Greedy ids must be Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import cached_checkpoint, reference_greedy
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig
from vllm_lite.engine import block_manager
from vllm_lite.outputs import OutputAccumulator

NUM_TOKENS = 30
SHARED = [7, 99, 23, 54, 201, 13, 77, 140, 5, 31, 62, 88, 250, 17, 40, 111, 90, 3, 66, 181]
# Lengths on and around the edges of blocks of 8; the second half begins with the same 20 tokens.
PROMPTS = [[(17 * i + 5 * n) % 254 + 2 for i in range(n)] for n in (7, 8, 9, 10, 15, 16, 17, 24)]
PROMPTS += [SHARED + [(31 * i + n) % 254 + 2 for i in range(n)] for n in (1, 3, 4, 5, 12)]

Submit = Callable[[build.EngineParts, list[SamplingParams]], dict[str, list[int]]]


def make_parts(folder: Path, **overrides: Any) -> build.EngineParts:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 8, "num_kv_blocks": 200, "seed": 0, "num_threads": 1}
    return build.build_parts(EngineConfig(model=str(folder), **{**settings, **overrides}))


def collect(parts: build.EngineParts, ids: dict[str, list[int]]) -> None:
    for delta in parts.engine.step(parts.executor):
        ids.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)


def drain(parts: build.EngineParts, ids: dict[str, list[int]]) -> dict[str, list[int]]:
    while parts.engine.has_unfinished:
        collect(parts, ids)
    stats = parts.engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    return ids


def one_by_one(parts: build.EngineParts, params: list[SamplingParams]) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        parts.engine.add_request(str(index), None, list(prompt), params[index])
        drain(parts, ids)
    return ids


def all_at_once(parts: build.EngineParts, params: list[SamplingParams]) -> dict[str, list[int]]:
    for index, prompt in enumerate(PROMPTS):
        parts.engine.add_request(str(index), None, list(prompt), params[index])
    return drain(parts, {})


def staggered(parts: build.EngineParts, params: list[SamplingParams]) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        parts.engine.add_request(str(index), None, list(prompt), params[index])
        for _ in range(3):
            collect(parts, ids)
    return drain(parts, ids)


def greedy() -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)] * len(PROMPTS)


def seeded(first_seed: int = 100) -> list[SamplingParams]:
    """Different settings for each row, so that neighbours could disturb one another if anything were shared."""
    settings: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.02},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"top_k": 50, "top_p": 0.9, "temperature": 1.5},
    ]
    return [
        SamplingParams(seed=first_seed + i, max_tokens=NUM_TOKENS, ignore_eos=True, **settings[i % len(settings)])
        for i in range(len(PROMPTS))
    ]


ARRANGEMENTS: dict[str, tuple[Submit, dict[str, Any]]] = {
    "alone": (one_by_one, {"enable_prefix_caching": False}),
    "alone, with reuse": (one_by_one, {}),
    "all at once": (all_at_once, {}),
    "all at once, no reuse": (all_at_once, {"enable_prefix_caching": False}),
    "staggered": (staggered, {}),
    "token budget 16": (all_at_once, {"max_num_batched_tokens": 16}),
    "token budget 5, blocks of 16": (staggered, {"max_num_batched_tokens": 5, "block_size": 16}),
    "20 blocks": (all_at_once, {"num_kv_blocks": 20}),
    "20 blocks, no reuse": (staggered, {"num_kv_blocks": 20, "enable_prefix_caching": False}),
    "3 sequences": (staggered, {"max_num_seqs": 3}),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_checkpoint("llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, list[int]]]:
    reference = {str(i): reference_greedy(folder, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)}
    assert all(len(set(ids)) >= 3 for ids in reference.values())
    alone = one_by_one(make_parts(folder, enable_prefix_caching=False), seeded())
    return {"greedy": reference, "seeded": alone}


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_same_tokens(folder: Path, expected: dict[str, dict[str, list[int]]], arrangement: str, mode: str) -> None:
    submit, overrides = ARRANGEMENTS[arrangement]
    parts = make_parts(folder, **overrides)
    assert submit(parts, greedy() if mode == "greedy" else seeded()) == expected[mode]
    stats = parts.engine.stats()
    assert (stats.num_preemptions > 0) == ("20 blocks" in arrangement)
    reuses = overrides.get("enable_prefix_caching", True)
    if not reuses:
        assert stats.num_prefix_hit_tokens == 0
    elif submit in (one_by_one, staggered) and parts.settings.block_size == 8:
        assert stats.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize("num_kv_blocks", [20, 200])
def test_same_tokens_when_every_hash_collides(
    folder: Path,
    expected: dict[str, dict[str, list[int]]],
    mode: str,
    num_kv_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_manager, "hash_block", lambda parent_hash, token_ids: 7)
    parts = make_parts(folder, num_kv_blocks=num_kv_blocks)
    assert staggered(parts, greedy() if mode == "greedy" else seeded()) == expected[mode]
    assert parts.engine.stats().num_prefix_hit_tokens > 0


CANDIDATES: list[dict[str, Any]] = [
    {"n": 3, "seed": 5},
    {"n": 2, "best_of": 3, "seed": 6, "top_p": 0.9},
    {"n": 3, "use_beam_search": True, "temperature": 0},
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def expected_candidates(folder: Path) -> list[list[tuple[object, ...]]]:
    parts = make_parts(folder, enable_prefix_caching=False)
    return [outcome for index in range(len(PROMPTS)) for outcome in run_candidates(parts, [index], 0)]


def run_candidates(parts: build.EngineParts, indices: list[int], steps_between: int) -> list[list[tuple[object, ...]]]:
    """Ids and reasons of all candidates of some prompts."""
    totals: dict[str, OutputAccumulator] = {}

    def step() -> None:
        for delta in parts.engine.step(parts.executor):
            totals[delta.request_id].add(delta)

    for index in indices:
        params = SamplingParams(max_tokens=12, ignore_eos=True, **CANDIDATES[index % len(CANDIDATES)])
        totals[str(index)] = OutputAccumulator(str(index), None, PROMPTS[index], params.n)
        parts.engine.add_request(str(index), None, list(PROMPTS[index]), params)
        for _ in range(steps_between):
            step()
    while parts.engine.has_unfinished:
        step()
    stats = parts.engine.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    return [[(o.token_ids, o.finish_reason) for o in total.output().outputs] for total in totals.values()]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_kv_blocks": 24},
        {"num_kv_blocks": 24, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 5, "num_kv_blocks": 24},
        {"max_num_seqs": 3, "block_size": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps_between", [0, 3])
def test_case_m3_candidates_and_beams_are_those_of_requests_run_alone(
    folder: Path, expected_candidates: list[list[tuple[object, ...]]], overrides: dict[str, Any], steps_between: int
) -> None:
    parts = make_parts(folder, **overrides)
    assert run_candidates(parts, list(range(len(PROMPTS))), steps_between) == expected_candidates
    if "max_num_batched_tokens" not in overrides:  # fewer run at once where prompts come in many chunks
        assert (parts.engine.stats().num_preemptions > 0) == ("num_kv_blocks" in overrides)
    assert len({ids for ids, _ in expected_candidates[0]}) == 3


def test_case_p4_a_seed_counts_beside_neighbours_without_one(folder: Path) -> None:
    """Seven that have none and seven that have others: the request gets the tokens that it gets alone."""
    params = SamplingParams(seed=42, max_tokens=20, ignore_eos=True)
    unseeded = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = make_parts(folder, seed=None)
    alone.engine.add_request("x", None, [88], params)
    expected = drain(alone, {})["x"]
    for _ in range(2):
        parts = make_parts(folder, seed=None)
        for index in range(7):
            parts.engine.add_request(f"unseeded {index}", None, [88], unseeded)
        parts.engine.add_request("x", None, [88], params)
        for index in range(7):
            parts.engine.add_request(f"seeded {index}", None, [88], replace(params, seed=43 + index))
        found = drain(parts, {})
        assert found["x"] == expected
        assert len({tuple(ids) for ids in found.values()}) == 15


def test_other_seeds_give_other_tokens(folder: Path, expected: dict[str, dict[str, list[int]]]) -> None:
    other = all_at_once(make_parts(folder), seeded(first_seed=900))
    assert all(other[name] != ids for name, ids in expected["seeded"].items())


def test_unseeded_requests_differ_from_each_other_and_after_a_restart(folder: Path) -> None:
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)] * len(PROMPTS)
    parts = make_parts(folder, seed=None)
    runs = [all_at_once(parts, params), all_at_once(parts, params), all_at_once(make_parts(folder, seed=None), params)]
    for name in runs[0]:
        assert len({tuple(run[name]) for run in runs}) == 3


def test_a_server_seed_makes_a_restart_repeat_itself(folder: Path) -> None:
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)] * len(PROMPTS)
    first, second = (all_at_once(make_parts(folder, seed=5), params) for _ in range(2))
    assert first == second
    assert first != all_at_once(make_parts(folder, seed=6), params)
