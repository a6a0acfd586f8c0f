"""Checks of the whole engine in this process: Hugging Face's tokens, and the same with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_checks.outcome import Outcome, passed_if
from tests.helpers.checkpoints import cached_checkpoint, reference_greedy
from vllm_lite import SamplingParams, build
from vllm_lite.config import EngineConfig

NUM_TOKENS = 24
PROMPTS = [[(17 * i + 5 * n) % 254 + 2 for i in range(n)] for n in (1, 7, 16, 17, 40, 90)]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WIDE: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
"""Heads of 64, which tensor cores take."""


def generate(folder: Path, device: str, **fields: Any) -> list[list[int]]:
    """Greedy ids of all prompts at once, in steps small enough for prompts to come in chunks."""
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_kv_blocks": 80, "dtype": "float32"}
    parts = build.build_parts(EngineConfig(model=str(folder), device=device, **{**sizes, **fields}))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    generated: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        parts.engine.add_request(str(index), None, prompt, params)
        generated[str(index)] = []
    while parts.engine.has_unfinished:
        for delta in parts.engine.step(parts.executor):
            generated[delta.request_id].extend(delta.outputs[0].token_ids)
    return list(generated.values())


def check_greedy(device: str = "cuda", families: Sequence[str] = FAMILIES) -> Outcome:
    """Every token in float32; in bfloat16, where roundings differ, how many are the same is only told."""
    shares = {}
    for family in families:
        folder = cached_checkpoint(family)
        expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
        shares[f"{family}, float32"] = share_of_equal(generate(folder, device), expected)
    is_equal = all(share == 1 for share in shares.values())
    folder = cached_checkpoint("llama", dtype=torch.bfloat16, **WIDE)
    expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    shares["llama, bfloat16"] = share_of_equal(generate(folder, device, dtype="bfloat16"), expected)
    summary = f"tokens as Hugging Face's: {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}"
    return passed_if(is_equal, summary, share_of_equal_tokens=shares)


def check_graphs(device: str = "cuda") -> Outcome:
    """Captured decodes give the tokens of steps that Python launches."""
    shares = {}
    for name, fields in (("float32", {}), ("bfloat16, heads of 64", {"dtype": "bfloat16"})):
        folder = cached_checkpoint("llama", dtype=torch.bfloat16, **WIDE) if fields else cached_checkpoint("llama")
        captured = generate(folder, device, **fields)
        shares[name] = share_of_equal(captured, generate(folder, device, enforce_eager=True, **fields))
    summary = f"tokens as without graphs: {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}"
    return passed_if(shares["float32"] == 1, summary, share_of_equal_tokens=shares)


def share_of_equal(ids: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Of the tokens, those before the first that differs in their row."""
    num_equal = 0
    for row, expected_row in zip(ids, expected, strict=True):
        pairs = list(zip(row, expected_row, strict=True))
        num_equal += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return num_equal / sum(map(len, expected))
