"""The sampler on given logits: distributions, penalties, edges, and independence of rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.cpu_kernels import cpu_space
from tests.helpers.sampling import GREEDY, Row, sampling_input
from tests.ops.tensors import tokens_shape, workspace
from vllm_lite.engine.step import NO_TOKEN, SamplingInput, StepOutput
from vllm_lite.ops import sample as op
from vllm_lite.ops.workspace import Workspace
from vllm_lite.worker import sampler
from vllm_lite.worker.random_numbers import uniforms
from vllm_lite.worker.sampler import is_plain_greedy

A, B, C, D = 34, 35, 36, 37
VOCAB = 258
NUM_DRAWS = 4000


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def space(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on both implementations."""
    monkeypatch.setitem(SPACES, "now", cpu_space() if request.param == "cpu" else workspace())


SPACES: dict[str, Workspace] = {}


def sample(logits: torch.Tensor, rows: SamplingInput) -> npt.NDArray[np.int32]:
    """As the model runner does."""
    return sample_all(logits, rows).token_ids


def sample_all(logits: torch.Tensor, rows: SamplingInput) -> StepOutput:
    return sampler.sample(SPACES["now"], tokens_shape(len(logits), len(logits)), logits, rows)


def const_logits(values: dict[int, float], other: float = -30.0, num_rows: int = 1) -> torch.Tensor:
    logits = torch.full((num_rows, VOCAB), other)
    for token, value in values.items():
        logits[:, token] = value
    return logits


def probabilities(**shares: float) -> dict[int, float]:
    names = {"a": A, "b": B, "c": C, "d": D}
    return {names[name]: math.log(share) for name, share in shares.items()}


ABCD = probabilities(a=0.1, b=0.2, c=0.3, d=0.4)


def draw(row: Row, logits: dict[int, float] = ABCD) -> Counter[int]:
    """Tokens of NUM_DRAWS rows that differ in position only."""
    rows = [replace(row, seed=11, position=i) for i in range(NUM_DRAWS)]
    return Counter(sample(const_logits(logits, num_rows=NUM_DRAWS), sampling_input(rows)).tolist())


def assert_shares(counts: Counter[int], shares: dict[int, float]) -> None:
    assert set(counts) <= set(shares)
    for token, share in shares.items():
        sigma = math.sqrt(share * (1 - share) / NUM_DRAWS)
        assert abs(counts[token] / NUM_DRAWS - share) <= 4 * sigma, (token, counts)


def pick(row: Row, logits: torch.Tensor) -> int:
    return int(sample(logits.clone(), sampling_input([row]))[0])


@pytest.mark.parametrize(
    ("row", "shares"),
    [
        (Row(top_k=2, top_p=0.5), {D: 1.0}),
        (Row(top_k=2), {C: 0.4286, D: 0.5714}),
        (Row(top_p=0.65), {C: 0.4286, D: 0.5714}),
        (Row(top_p=0.95), {A: 0.1, B: 0.2, C: 0.3, D: 0.4}),
        (Row(), {A: 0.1, B: 0.2, C: 0.3, D: 0.4}),
        (Row(temperature=0.5), {A: 0.0333, B: 0.1333, C: 0.3, D: 0.5333}),
        (Row(top_k=1), {D: 1.0}),
        (Row(min_p=0.6), {C: 0.4286, D: 0.5714}),
        (Row(min_p=0.6, top_p=0.95), {C: 0.4286, D: 0.5714}),
        (Row(min_p=0.6, top_k=3), {C: 0.4286, D: 0.5714}),
        (Row(top_k=3, top_p=0.9), {B: 0.2222, C: 0.3333, D: 0.4444}),
        (Row(temperature=0.5, top_p=0.8), {C: 0.36, D: 0.64}),
    ],
)
def test_case_p2_order_of_top_k_and_top_p(row: Row, shares: dict[int, float]) -> None:
    assert_shares(draw(row), shares)


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.7, 0.97, 1.0])
@pytest.mark.parametrize("top_k", [0, 3, 70, 600])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_equals_a_full_sort_on_a_large_vocabulary(top_k: int, top_p: float, min_p: float) -> None:
    """The tokens kept, found by many draws, are those that sorting everything keeps."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(4)) * 2
    order = sorted(range(3000), key=lambda token: (-logits[token].item(), token))
    kept = order[:top_k] if top_k else order
    shares = torch.softmax(logits[kept].double(), 0)
    before = shares.cumsum(0) - shares
    kept = [token for token, mass in zip(kept, before.tolist()) if mass < top_p]
    shares = torch.softmax(logits[kept].double(), 0)
    kept = [token for token, share in zip(kept, shares.tolist()) if share >= min_p * shares[0].item()]
    rows = [Row(top_k=top_k, top_p=top_p, min_p=min_p, seed=5, position=i) for i in range(500)]
    tokens = sample(logits.repeat(500, 1), sampling_input(rows)).tolist()
    assert set(tokens) <= set(kept)
    assert len(set(tokens)) >= min(len(kept), 20) * 0.5
    shares = torch.softmax(logits[kept].double(), 0)
    mean = sum(tokens.count(token) for token in kept[: len(kept) // 2]) / 500
    assert abs(mean - shares[: len(kept) // 2].sum().item()) < 4 * math.sqrt(0.25 / 500)


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-9, 1e-5, 1e-4, 0.01])
@pytest.mark.parametrize("top_p", [1.0, 1e-4, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_case_p1_tiny_temperature_is_greedy(temperature: float, top_p: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 20).to(dtype).float()
    logits[77] = 90.0
    for seed in range(20):
        assert pick(Row(temperature=temperature, top_p=top_p, seed=seed), logits[None]) == 77


@pytest.mark.parametrize("row", [Row(), Row(top_p=0.99), Row(top_k=10), Row(min_p=0.5)])
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e30, 1e38])
def test_every_temperature_gives_a_token(temperature: float, row: Row) -> None:
    for scale in (1e-30, 1.0, 3e38):
        logits = torch.linspace(-1.0, 1.0, VOCAB)[None] * scale
        assert 0 <= pick(replace(row, temperature=temperature), logits) < VOCAB


def test_huge_temperature_is_uniform_but_bans_hold() -> None:
    rows = [Row(temperature=1e38, seed=3, position=i, banned=[A]) for i in range(NUM_DRAWS)]
    counts = Counter(sample(const_logits(ABCD, num_rows=NUM_DRAWS), sampling_input(rows)).tolist())
    assert len(counts) == VOCAB - 1
    assert A not in counts


def generate(row: Row, logits: dict[int, float], num_tokens: int, other: float = -30.0) -> str:
    """Repeats a row with its own output as history, beside a row of other settings."""
    output: list[int] = []
    for _ in range(num_tokens):
        rows = [Row(seed=1, presence_penalty=1.0, prompt=[1], output=[2, 3]), replace(row, output=output)]
        output.append(int(sample(const_logits(logits, other, 2), sampling_input(rows))[1]))
    return "".join(chr(token - A + ord("A")) for token in output)


P3 = {A: 2.05, B: 1.5, C: 1.2}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GREEDY, "AAAAAAAAAA"),
        (replace(GREEDY, presence_penalty=0.6), "ABAAAAAAAA"),
        (replace(GREEDY, frequency_penalty=0.6), "ABACBACBAC"),
        (replace(GREEDY, repetition_penalty=1.5, prompt=[91]), "ABAA"),
        (replace(GREEDY, repetition_penalty=1.5, prompt=[A]), "BAAA"),
        (replace(GREEDY, presence_penalty=1.0, prompt=[A]), "ABCA"),
    ],
)
def test_case_p3_penalties(row: Row, expected: str) -> None:
    assert generate(row, P3, len(expected)) == expected


def test_case_p3_negative_logits_are_multiplied() -> None:
    row = replace(GREEDY, repetition_penalty=2.0, prompt=[A])
    assert generate(row, {A: -0.5, B: -0.6, C: -3.0}, 1) == "B"


def test_repetition_counts_a_token_once_and_precedes_the_others() -> None:
    row = replace(GREEDY, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, prompt=[A, A])
    row = replace(row, output=[A, A, A])
    logits = const_logits({A: 8.0})  # 8 / 2 - 3 * 0.5 - 0.25 = 2.25
    for rival, expected in ((2.24, A), (2.26, B)):
        logits[0, B] = rival
        assert pick(row, logits) == expected


@pytest.mark.parametrize("penalty", [1e-40, 1e-30, 1e30, 3e38])
def test_extreme_repetition_penalty_gives_a_token(penalty: float) -> None:
    logits = const_logits({A: 2.0, B: -2.0, C: 0.0})
    for temperature in (0.0, 1.0):
        row = Row(temperature=temperature, repetition_penalty=penalty, prompt=[A, B, C])
        assert 0 <= pick(row, logits) < VOCAB


def test_case_p8_edge_values() -> None:
    tied = const_logits({B: 3.0, D: 3.0, A: 1.0, C: 1.0})
    for seed in range(30):
        assert pick(Row(top_k=1, seed=seed), tied) == pick(GREEDY, tied) == B
        assert pick(Row(min_p=1.0, seed=seed), const_logits(ABCD)) == D
        # A tie at rank k keeps the lower id.
        assert pick(Row(top_k=3, temperature=100.0, seed=seed), tied) in (B, D, A)
        for off in (0, -1, VOCAB, 10**9):
            assert pick(Row(top_k=off, seed=seed), tied) == pick(Row(seed=seed), tied)


def test_ties_across_the_first_candidates_keep_the_lower_ids() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 900:] = -0.0
    for row, num_kept in ((Row(top_k=100), 100), (Row(top_p=0.5), 500)):
        rows = [replace(row, seed=seed) for seed in range(6 * num_kept)]
        picks = set(sample(logits.repeat(len(rows), 1), sampling_input(rows)).tolist())
        assert max(picks) <= num_kept
        assert len(picks) > 0.9 * num_kept


def test_bias_moves_single_logits() -> None:
    assert pick(replace(GREEDY, bias={A: 5.0}), const_logits(ABCD)) == A
    assert pick(replace(GREEDY, bias={D: -100.0, C: -100.0}), const_logits(ABCD)) == B
    for value in (1e38, -1e38):
        assert 0 <= pick(Row(bias={A: value}), const_logits(ABCD)) < VOCAB


def test_allowed_and_banned() -> None:
    logits = const_logits(ABCD)
    assert pick(replace(GREEDY, allowed=[A, B]), logits) == B
    assert pick(replace(GREEDY, banned=[D, C]), logits) == B
    assert pick(replace(GREEDY, allowed=[7, 9], banned=[7]), logits) == 9
    # Everything that is allowed is banned: the ban is lifted, what is not allowed stays out.
    for row in (GREEDY, Row(), Row(top_p=0.9), Row(temperature=1e38)):
        assert pick(replace(row, allowed=[7, A, 9], banned=[7, A, 9]), logits) in (7, A, 9)
    rows = [replace(GREEDY, banned=[D]), GREEDY, replace(GREEDY, allowed=[5], banned=[5]), GREEDY]
    assert sample(const_logits(ABCD, num_rows=4), sampling_input(rows)).tolist() == [C, D, 5, D]


@pytest.mark.parametrize("row", [GREEDY, Row(), Row(top_k=5), Row(top_p=0.9), Row(min_p=0.1), Row(bias={3: 1.0})])
def test_case_h4_rows_that_are_not_finite_have_no_token(row: Row) -> None:
    logits = const_logits(ABCD, num_rows=6)
    logits[0] = torch.nan
    logits[2, 5] = torch.nan
    logits[3] = -torch.inf
    logits[4, 9] = torch.inf
    logits[5] = -torch.inf
    logits[5, B] = 1.0
    tokens = sample(logits, sampling_input([row] * 6)).tolist()
    assert [token == NO_TOKEN for token in tokens] == [True, False, True, True, True, False]
    assert tokens[5] == B


def test_no_finite_logit_among_the_allowed() -> None:
    logits = const_logits({A: 1.0}, other=-math.inf)
    assert pick(replace(GREEDY, allowed=[B]), logits) == NO_TOKEN


def random_row(source: random.Random) -> Row:
    history = [source.randrange(900) for _ in range(source.randrange(40))]
    return Row(
        temperature=source.choice([0.0, 0.3, 1.0, 1.0, 2.0, 20.0]),
        top_k=source.choice([0, 0, 1, 5, 100, 899]),
        top_p=source.choice([1.0, 1.0, 0.2, 0.9, 0.999]),
        min_p=source.choice([0.0, 0.0, 0.05]),
        presence_penalty=source.choice([0.0, 0.7]),
        frequency_penalty=source.choice([0.0, -0.3]),
        repetition_penalty=source.choice([1.0, 1.2]),
        seed=source.getrandbits(64),
        position=source.randrange(1000),
        prompt=history[:10],
        output=history[10:],
        bias={source.randrange(900): 2.0} if source.random() < 0.3 else {},
        banned=source.sample(range(900), 3) if source.random() < 0.3 else (),
        allowed=source.sample(range(900), 50) if source.random() < 0.2 else None,
    )


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    source = random.Random(8)
    rows = [random_row(source) for _ in range(64)]
    logits = torch.randn(64, 900, generator=torch.Generator().manual_seed(2)) * 3
    alone = [pick(row, logits[r : r + 1]) for r, row in enumerate(rows)]
    for _ in range(5):
        order = source.sample(range(64), source.choice([64, 40, 7]))
        together = sample(logits[order], sampling_input([rows[r] for r in order]))
        assert together.tolist() == [alone[r] for r in order]


def test_row_groups_do_not_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(top_p=0.9 if i % 2 else 1.0, seed=i) for i in range(10)]
    logits = torch.randn(10, 500, generator=torch.Generator().manual_seed(2))
    expected = sample(logits.clone(), sampling_input(rows)).tolist()
    monkeypatch.setattr("vllm_lite.ops.sample.MAX_LOGITS_AT_A_TIME", 1)
    assert sample(logits.clone(), sampling_input(rows)).tolist() == expected


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(1, 5000)

    def text(seed: int) -> list[int]:
        return [pick(Row(seed=seed, position=position), logits) for position in range(10)]

    assert text(1) == text(1)
    seen = {token for seed in range(20) for token in text(seed)}
    assert len(seen) > 190


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.int32))
    numbers = uniforms(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.004
    for rolled in (np.roll(numbers, 1, 0), np.roll(numbers, 1, 1), np.roll(numbers, (1, 1), (0, 1))):
        assert abs(np.corrcoef(numbers.ravel(), rolled.ravel())[0, 1]) < 0.015
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert ((counts - 900) ** 2 / 900).sum() < 160
    extremes = uniforms(np.array([0, 2**64 - 1], np.uint64), np.array([2**31 - 1, 0], np.int32))
    assert ((extremes >= 0) & (extremes < 1)).all()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([GREEDY, GREEDY], True),
        ([GREEDY, Row(top_k=1)], True),
        ([GREEDY, Row()], False),
        ([GREEDY, replace(GREEDY, bias={1: 1.0})], False),
        ([GREEDY, replace(GREEDY, banned=[1])], False),
        ([GREEDY, replace(GREEDY, allowed=[1])], False),
        ([GREEDY, replace(GREEDY, prompt=[1])], False),
    ],
)
def test_is_plain_greedy(rows: Sequence[Row], expected: bool) -> None:
    assert is_plain_greedy(sampling_input(rows)) is expected


class ReadsNothingBack(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where Python looks at a number of a tensor, which on a GPU is to wait for it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func.name().split(".")[0] not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_waited_for_once_unless_candidates_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        GREEDY, Row(seed=1), Row(seed=2, min_p=0.1), replace(GREEDY, banned=[5, 6]), Row(seed=3, bias={7: 3.0}),
        Row(seed=4, repetition_penalty=1.3, presence_penalty=0.5, prompt=[1, 2], output=[3]), Row(allowed=[4, 9]),
        Row(seed=1),
    ]  # fmt: skip
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))
    logits[-1, 3] = torch.nan
    expected = sample(logits.clone(), sampling_input(rows))
    assert expected[-1] == NO_TOKEN and len(set(expected)) > 4
    monkeypatch.setattr(op, "_can_be_asked", lambda tensor: False)
    with torch.inference_mode(), ReadsNothingBack():  # type: ignore[no-untyped-call]
        ids = sample(logits.clone(), sampling_input(rows))
    assert ids.tolist() == expected.tolist()


def test_logprobs_are_the_models_own() -> None:
    logits = const_logits(ABCD, num_rows=4)
    rows = [
        Row(seed=1, num_logprobs=2),
        Row(temperature=0.0),
        Row(seed=1, banned=[D], bias={A: 50.0}, temperature=3.0, top_k=1, num_logprobs=0),
        Row(temperature=0.0, num_logprobs=3),
    ]
    output = sample_all(logits.clone(), sampling_input(rows))
    expected = logits[0].log_softmax(dim=0)
    picked = output.token_ids[[0, 2, 3]].tolist()
    assert picked[1:] == [A, D]
    np.testing.assert_allclose(output.logprobs.of_tokens, expected[picked].numpy(), atol=1e-6)
    assert output.logprobs.top_ids.tolist() == [[D, C, B]] * 3
    np.testing.assert_allclose(output.logprobs.top_logprobs, [expected[[D, C, B]].tolist()] * 3, atol=1e-6)


def test_continuations_are_what_may_be_picked_over_the_models_total() -> None:
    logits = const_logits(ABCD, num_rows=2)
    rows = [
        Row(temperature=0.0, num_continuations=3),
        Row(temperature=0.0, num_continuations=5, allowed=[A, C], bias={A: 0.5}),
    ]
    output = sample_all(logits.clone(), sampling_input(rows))
    table = logits[0].log_softmax(dim=0)
    ids, logprobs = output.continuations.token_ids, output.continuations.logprobs
    assert ids[0, :3].tolist() == [D, C, B] and ids[1, :2].tolist() == [C, A]
    np.testing.assert_allclose(logprobs[0, :3], table[[D, C, B]].numpy(), atol=1e-6)
    np.testing.assert_allclose(logprobs[1, :2], [table[C], table[A] + 0.5], atol=1e-6)
    assert np.isneginf(logprobs[1, 2:]).all()


def test_logprobs_of_rows_without_a_token_harm_no_other() -> None:
    logits = const_logits(ABCD, num_rows=3)
    logits[1, 5] = torch.nan
    rows = [Row(temperature=0.0, num_logprobs=1), Row(num_logprobs=2, num_continuations=4), Row(temperature=0.0)]
    output = sample_all(logits.clone(), sampling_input(rows))
    assert output.token_ids.tolist() == [D, NO_TOKEN, D]
    assert output.logprobs.of_tokens[0] == pytest.approx(float(logits[0].log_softmax(dim=0)[D]))


def test_impossible_tokens_have_a_finite_logprob() -> None:
    logits = const_logits(ABCD)
    logits[0, A] = -torch.inf
    output = sample_all(logits, sampling_input([Row(temperature=0.0, allowed=[D], num_logprobs=VOCAB + 5)]))
    assert np.isfinite(output.logprobs.top_logprobs).all() and output.logprobs.top_ids.shape == (1, VOCAB)
    assert output.logprobs.top_ids[0, -1] == A
