"""The default model in float32: the ids and the logits that Hugging Face gives for real prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts.hugging_face import load_reference
from tests.helpers.runner import last_logits, make_runner
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Q: What is 12 + 30?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The theory of evolution, first proposed by Charles Darwin in 1859, states that",
    "1, 2, 3, 4, 5,",
    "Ein kurzer Satz auf Deutsch:",
    "SELECT name, age FROM users WHERE",
    "The three laws of thermodynamics are as follows. First,",
    "It was the best of times, it was the worst of times,",
    "To make pancakes you need flour, eggs, milk and",
    "import numpy as np\n\nx = np.",
    "The quick brown fox",
    "In 2024, the most popular programming language was",
    "Photosynthesis is the process by which plants",
    "<html>\n<head>\n<title>",
    "My favourite season is autumn, since the leaves turn red and the air is crisp; besides,",
]


@pytest.fixture(scope="module")
def parts() -> build.EngineParts:
    return build.build_parts(EngineConfig(dtype="float32", max_model_len=256, num_kv_blocks=400, num_threads=1))


@pytest.fixture(scope="module")
def reference(parts: build.EngineParts) -> Any:
    return load_reference(parts.checkpoint_path)


def test_greedy_ids_equal_hugging_face(parts: build.EngineParts, reference: Any) -> None:
    prompts = [parts.tokenizer.encode(prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        parts.engine.add_request(str(index), None, prompt, params)
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            outputs[delta.request_id].extend(delta.outputs[0].token_ids)
    for index, prompt in enumerate(prompts):
        output = outputs[str(index)]
        assert len(output) == NUM_TOKENS
        # One forward over prompt and output shows every choice that `generate` would make on the way.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert output == logits.argmax(-1).tolist(), PROMPTS[index]


def test_hugging_face_generate_agrees(parts: build.EngineParts, reference: Any) -> None:
    """The same through `generate` itself, once, end of sequence included."""
    prompt = parts.tokenizer.encode(PROMPTS[0])
    ids = torch.tensor([prompt])
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)
    parts.engine.add_request("one", None, prompt, SamplingParams(temperature=0, max_tokens=48))
    output: list[int] = []
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            output.extend(delta.outputs[0].token_ids)
    assert output == expected[0, len(prompt) :].tolist()
    assert output[-1] in parts.model.eos_token_ids


def test_first_logits_equal_hugging_face(parts: build.EngineParts, reference: Any) -> None:
    runner = make_runner(parts.model, reference.state_dict(), max_num_batched_tokens=128)
    for text in PROMPTS:
        prompt = parts.tokenizer.encode(text)
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(last_logits(runner, prompt), expected, rtol=1e-4, atol=1e-4)
