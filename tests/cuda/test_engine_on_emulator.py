"""The whole engine on the CUDA kernels: the tokens of the CPU path, whatever the engine does to the requests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.emulator import EmulatedKernels, missing_requirement
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.checked_kernels import checked_kernels
from tests.helpers.checkpoints import cached_checkpoint, reference_greedy, reference_model
from tests.helpers.engine_fakes import greedy
from tests.helpers.runner import last_logits, load_runner
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.settings import EngineSettings
from vllm_lite.engine.step import StepInput, StepOutput
from vllm_lite.ops.cuda_kernels import kernels_for
from vllm_lite.outputs import OutputAccumulator
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.worker.hf_config import read_model_config
from vllm_lite.worker.model_runner import ModelRunner

MISSING = missing_requirement()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

NUM_TOKENS = 12
SHARED = [7, 99, 23, 54, 201, 13, 77, 140, 5, 31, 62, 88, 250, 17, 40, 111, 90, 3, 66, 181]
# Lengths around the edges of blocks of 8, then two that begin with the same 20 tokens.
PROMPTS = [[(17 * i + 5 * n) % 254 + 2 for i in range(n)] for n in (1, 7, 8, 17, 40)]
PROMPTS += [SHARED + [(31 * i + n) % 254 + 2 for i in range(n)] for n in (3, 12)]
TENSOR_CORE_SIZES: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@cache
def emulated(dtype: torch.dtype, head_dim: int) -> EmulatedKernels:
    return EmulatedKernels(kernels_for(dtype, head_dim), is_checked=False)


def runner_of(
    folder: Path, dtype: torch.dtype, *, on_emulator: bool, is_checked: bool = False, **sizes: Any
) -> ModelRunner:
    """With a cache full of NaN, which no token may see."""
    head_dim = read_model_config(folder, trust_remote_code=False).head_dim
    kernels = (checked_kernels() if is_checked else emulated(dtype, head_dim)) if on_emulator else None
    runner = load_runner(folder, dtype, cuda=kernels, block_size=8, **sizes)
    for layer in runner.caches:
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    return runner


class Engine:
    """The engine with a runner of its own, and what its steps were."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps: list[StepInput] = []
        num_tokens, num_seqs = len(runner.tensors.token_ids), len(runner.tensors.context_lens)
        settings = EngineSettings(
            block_size=8,
            num_blocks=len(runner.caches[0].key),
            max_model_len=64,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_tokens,
            max_logprobs=0,
            enable_prefix_caching=True,
            vocab_size=runner.model.config.vocab_size,
            eos_token_ids=frozenset(),
            seed=0,
        )
        self.engine = LLMEngine(settings, ByteTokenizer())

    def execute(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        return self.runner.run(step)

    def run(self, steps_between: int = 0) -> list[list[int]]:
        """The greedy ids of all prompts; a new one arrives every `steps_between` steps."""
        ids: list[list[int]] = [[] for _ in PROMPTS]

        def step() -> None:
            for delta in self.engine.step(self):
                ids[int(delta.request_id)].extend(delta.outputs[0].token_ids)

        for index, prompt in enumerate(PROMPTS):
            self.engine.add_request(str(index), None, list(prompt), greedy(max_tokens=NUM_TOKENS))
            for _ in range(steps_between):
                step()
        while self.engine.has_unfinished:
            step()
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_total_blocks
        return ids


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 8, "hidden_size": 80, "num_attention_heads": 8}),
        ("mistral", {"sliding_window": 10}),
        ("qwen3", {}),
        ("gpt2", {"num_hidden_layers": 2}),
        ("opt", {"num_hidden_layers": 2, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
        ("bloom", {"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48}),
        ("gpt_neox", {"num_hidden_layers": 2}),
    ],
    ids=["llama", "llama-odd-heads", "mistral-window", "qwen3", "gpt2", "opt-small-embedding", "bloom-6-heads", "neox"],
)
def test_tokens_are_those_of_hugging_face(family: str, overrides: dict[str, Any]) -> None:
    folder = cached_checkpoint(family, **overrides)
    expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert len({token for ids in expected for token in ids}) > 10
    assert Engine(runner_of(folder, torch.float32, on_emulator=True)).run() == expected


@pytest.mark.parametrize(
    ("sizes", "steps_between", "happens"),
    [
        ({"max_num_batched_tokens": 9}, 0, {"chunk after a cached prefix", "decodes beside chunks"}),
        ({"num_blocks": 13}, 0, {"preemption"}),
        ({"num_blocks": 13, "max_num_batched_tokens": 9}, 2, {"preemption", "chunk after a cached prefix"}),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 16}, 1, {"prefix hit", "decodes beside chunks"}),
        ({}, 3, {"prefix hit", "decodes beside chunks"}),
    ],
    ids=["chunks", "preemption", "both", "two-at-a-time", "prefix-hits"],
)
def test_chunks_preemption_and_prefix_hits_change_no_token(
    sizes: dict[str, Any], steps_between: int, happens: set[str]
) -> None:
    folder = cached_checkpoint("llama")
    engines = [Engine(runner_of(folder, torch.float32, on_emulator=flag, **sizes)) for flag in (True, False)]
    ids, expected = (engine.run(steps_between) for engine in engines)
    assert ids == expected
    assert things_that_happened(engines[0]) >= happens


def test_beams_candidates_and_logprobs_are_those_of_the_cpu() -> None:
    """Blocks are copied before they are written, and prompts are scored in pieces."""
    folder = cached_checkpoint("llama")
    results = []
    for flag in (True, False):
        engine = Engine(runner_of(folder, torch.float32, on_emulator=flag, max_num_seqs=8))
        kinds = [
            SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=9),
            SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True, prompt_logprobs=0),
        ]
        outputs = [OutputAccumulator(str(index), None, PROMPTS[4], 3) for index in range(len(kinds))]
        for output, params in zip(outputs, kinds):
            engine.engine.add_request(output.request_id, None, PROMPTS[4], params)
        while engine.engine.has_unfinished:
            for delta in engine.engine.step(engine):
                outputs[int(delta.request_id)].add(delta)
        assert any(len(step.copy_sources) for step in engine.steps)
        results.append([output.output() for output in outputs])
    for mine, expected in zip(*results):
        assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in expected.outputs]
        np.testing.assert_allclose(
            [o.cumulative_logprob for o in mine.outputs], [o.cumulative_logprob for o in expected.outputs], rtol=1e-4
        )
    scored = [[list(entry.values()) for entry in result[1].prompt_logprobs or () if entry] for result in results]
    assert len(scored[0]) == len(PROMPTS[4]) - 1
    np.testing.assert_allclose(scored[0], scored[1], atol=1e-4)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 64)])
def test_every_launch_of_the_engine_is_clean(dtype: torch.dtype, head_dim: int) -> None:
    """No race, no access outside of the tensors that a launch was given, the same bits in every order of threads."""
    folder = cached_checkpoint("qwen3", dtype=dtype, num_hidden_layers=1, head_dim=head_dim)
    sizes: dict[str, Any] = {"max_num_batched_tokens": 24, "num_blocks": 13}
    checked, plain = (
        Engine(runner_of(folder, dtype, on_emulator=True, is_checked=is_checked, **sizes))
        for is_checked in (True, False)
    )
    assert checked.run() == plain.run()
    assert things_that_happened(checked) >= {"preemption", "chunk after a cached prefix", "decodes beside chunks"}


def things_that_happened(engine: Engine) -> set[str]:
    stats = engine.engine.stats()
    new_lens = [np.diff(step.query_starts) for step in engine.steps]
    cached_lens = [step.context_lens - new for step, new in zip(engine.steps, new_lens)]
    happened = {
        "preemption": stats.num_preemptions > 0,
        "prefix hit": stats.num_prefix_hit_tokens > 0,
        "chunk after a cached prefix": any(((c > 0) & (new > 1)).any() for c, new in zip(cached_lens, new_lens)),
        "decodes beside chunks": any(0 < step.shape.num_decodes < step.shape.num_seqs for step in engine.steps),
    }
    return {name for name, is_true in happened.items() if is_true}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_from_tensor_cores(dtype: torch.dtype) -> None:
    """Each token is the best in float32 after those before it, up to what the dtype costs Hugging Face in logits."""
    folder = cached_checkpoint("llama", dtype=dtype, **TENSOR_CORE_SIZES)
    engine = Engine(runner_of(folder, dtype, on_emulator=True, max_num_batched_tokens=24, num_blocks=13))
    ids = engine.run()
    assert things_that_happened(engine) >= {"preemption", "chunk after a cached prefix", "decodes beside chunks"}
    exact, rounded = (reference_model(folder, dtype=kind) for kind in (torch.float32, dtype))
    num_clear = 0
    for prompt, row in zip(PROMPTS, ids):
        tokens = torch.tensor([prompt + row])
        with torch.inference_mode():
            logits, other = (model(tokens).logits[0, len(prompt) - 1 : -1].float() for model in (exact, rounded))
        is_near_best = logits >= logits.amax(dim=1, keepdim=True) - 2 * (logits - other).abs().max()
        assert is_near_best.gather(1, torch.tensor(row)[:, None]).all()
        num_clear += int((is_near_best.sum(dim=1) == 1).sum())
    assert num_clear > len(PROMPTS) * NUM_TOKENS / 2, "few tokens could have been told from a wrong one"


def test_bfloat16_is_as_near_to_float32_as_the_cpu_path() -> None:
    folder = cached_checkpoint("llama", dtype=torch.bfloat16)
    exact, plain, kernels = (
        last_logits(runner_of(folder, dtype, on_emulator=on_emulator), PROMPTS[4])
        for dtype, on_emulator in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    )
    assert (kernels - exact).abs().max() <= 2 * (plain - exact).abs().max()
    ids = Engine(runner_of(folder, torch.bfloat16, on_emulator=True, max_num_batched_tokens=16)).run()
    assert all(len(row) == NUM_TOKENS and min(row) >= 0 for row in ids)
