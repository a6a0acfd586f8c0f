"""The tokens of a request never depend on what else the engine does (cases M3, M4, P4)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.helpers.engine_fakes import SETTINGS, FakeExecutor, Run, greedy, make_engine
from vllm_lite.engine import block_manager
from vllm_lite.sampling_params import SamplingParams

PROMPTS = tuple(chr(ord("a") + i) * (9 + i) for i in range(8))
SHARED = "a prefix of twenty-four "
ParamsOf = Callable[[int], SamplingParams]


def greedily(_: int) -> SamplingParams:
    return greedy()


def sampled(index: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=100 + index, ignore_eos=True, max_tokens=30)


@functools.cache
def alone(prompts: tuple[str, ...], params_of: ParamsOf) -> dict[str, list[int]]:
    """Each request on an engine of its own without prefix reuse: what every arrangement must reproduce."""
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        run = Run(make_engine(enable_prefix_caching=False), FakeExecutor())
        run.add(str(index), prompt, params_of(index))
        tokens |= run.token_ids()
    return tokens


def together(prompts: tuple[str, ...], params_of: ParamsOf, *, steps_between: int = 0, **changes: int) -> Run:
    """All requests on one engine, one every `steps_between` steps."""
    executor = FakeExecutor(block_size=changes.get("block_size", SETTINGS.block_size))
    run = Run(make_engine(**changes), executor)
    for index, prompt in enumerate(prompts):
        run.add(str(index), prompt, params_of(index))
        for _ in range(steps_between):
            run.step()
    return run


@pytest.fixture(params=[False, True], ids=["hash", "colliding hash"])
def any_hash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(block_manager, "hash_block", lambda parent_hash, token_ids: 7)


@pytest.mark.usefixtures("any_hash")
@pytest.mark.parametrize("params_of", [greedily, sampled])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps_between": 3},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 3},
        {"max_num_seqs": 2},
        {"num_blocks": 20},
        {"num_blocks": 20, "steps_between": 2},
        {"num_blocks": 20, "max_num_batched_tokens": 16},
        {"num_blocks": 9, "max_num_batched_tokens": 5},
        {"block_size": 16, "num_blocks": 12},
    ],
    ids=str,
)
def test_tokens_are_those_of_requests_run_alone(
    changes: dict[str, int], enable_prefix_caching: bool, params_of: ParamsOf
) -> None:
    run = together(PROMPTS, params_of, enable_prefix_caching=enable_prefix_caching, **changes)
    assert run.token_ids() == alone(PROMPTS, params_of)
    if changes.get("num_blocks") == 20:
        assert run.engine.stats().num_preemptions > 0
