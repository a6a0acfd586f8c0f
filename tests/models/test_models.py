"""Every architecture, RoPE kind and head layout against Hugging Face in float32, on tiny models (cases L2 to L5)."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import cached_checkpoint, reference_greedy, reference_model
from tests.helpers.cpu_kernels import cpu_kernels
from tests.helpers.runner import greedy_ids, last_logits, load_runner, logits_after_prompts, make_runner
from vllm_lite.config import RopeConfig
from vllm_lite.errors import StartupError
from vllm_lite.kernels.cpu import CpuKernels
from vllm_lite.models.bloom import alibi_slopes
from vllm_lite.models.registry import build_model, model_class
from vllm_lite.worker.hf_config import read_model_config

PROMPT = [(17 * i + 5) % 254 + 2 for i in range(40)]
SHORT_PROMPTS = [PROMPT[3:4], PROMPT[5:18], PROMPT[1:34]]
NUM_TOKENS = 16

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral, window 9": ("mistral", {"sliding_window": 9}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows from layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, windows from layer 2": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    **{f"llama, {n} kv heads": ("llama", {"num_key_value_heads": n}) for n in (8, 4, 1)},
    "llama, head_dim 32": ("llama", {"head_dim": 32}),
    "llama, head_dim null": ("llama", {"head_dim": None}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama, theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "llama, yarn with mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "llama, yarn with attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "gpt2": ("gpt2", {}),
    "gpt2, 259 tokens, exact gelu": ("gpt2", {"seed": 1, "vocab_size": 259, "activation_function": "gelu"}),
    "gpt2, untied, inner size null": ("gpt2", {"tie_word_embeddings": False, "n_inner": None}),
    "gpt2, scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, scores unscaled": ("gpt2", {"scale_attn_weights": False}),
    "opt": ("opt", {}),
    "opt, untied": ("opt", {"tie_word_embeddings": False}),
    "opt, gelu": ("opt", {"activation_function": "gelu"}),
    "opt, norms after": ("opt", {"seed": 2, "do_layer_norm_before": False}),
    "opt, small embedding, norms after": ("opt", {"seed": 2, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt, large embedding": ("opt", {"word_embed_proj_dim": 96}),
    "opt, small embedding, untied": ("opt", {"word_embed_proj_dim": 32, "tie_word_embeddings": False}),
    "opt, no last norm": ("opt", {"_remove_final_layer_norm": True}),
    "opt, no biases": ("opt", {"enable_bias": False}),
    "opt, norms without parameters": ("opt", {"layer_norm_elementwise_affine": False}),
    "bloom": ("bloom", {}),
    "bloom, untied": ("bloom", {"tie_word_embeddings": False}),
    "bloom, 3 heads": ("bloom", {"num_attention_heads": 3, "hidden_size": 96}),
    "bloom, 6 heads": ("bloom", {"seed": 3, "num_attention_heads": 6, "hidden_size": 48}),
    "bloom, 12 heads": ("bloom", {"num_attention_heads": 12, "hidden_size": 96}),
    "bloom, normed residual": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "gpt_neox, one branch after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, whole heads turned": ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500}),
    "gpt_neox, no attention biases": ("gpt_neox", {"attention_bias": False}),
    "gpt_neox, tanh gelu": ("gpt_neox", {"hidden_act": "gelu_fast"}),
    "gpt_neox, linear": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "gpt_neox, yarn": ("gpt_neox", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
}
LAYER_NORM_NAMES = ["gpt2", "opt, small embedding, norms after", "bloom, 6 heads", "gpt_neox"]
"""One of each family with layer norms."""


@pytest.fixture(params=["torch", "kernels"])
def cpu(request: pytest.FixtureRequest) -> CpuKernels | None:
    """What computes on the CPU."""
    return cpu_kernels() if request.param == "kernels" else None


def checkpoint(name: str) -> Path:
    family, overrides = MODELS[name]
    return cached_checkpoint(family, **copy.deepcopy(overrides))


@pytest.mark.parametrize("name", MODELS)
def test_equals_hugging_face(name: str, cpu: CpuKernels | None) -> None:
    folder = checkpoint(name)
    reference = reference_model(folder)
    runner = load_runner(folder, cpu=cpu)
    expected = reference_greedy(folder, PROMPT, NUM_TOKENS)
    assert len(set(expected)) >= 3
    assert greedy_ids(runner, [PROMPT], NUM_TOKENS) == [expected]
    with torch.no_grad():
        expected_logits = reference(torch.tensor([PROMPT])).logits[0, -1]
    assert (last_logits(runner, PROMPT) - expected_logits).abs().max() < 1e-4


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    "name", ["llama", "mistral, window 9", "qwen2, windows from layer 1", "qwen3", *LAYER_NORM_NAMES]
)
def test_chunks_and_mixed_batches_change_nothing(name: str, block_size: int, cpu: CpuKernels | None) -> None:
    folder = checkpoint(name)
    runner = load_runner(folder, block_size=block_size, cpu=cpu)
    prompts = [PROMPT, *SHORT_PROMPTS]
    expected = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    assert greedy_ids(runner, prompts, NUM_TOKENS, budget=7) == expected
    assert greedy_ids(runner, prompts, NUM_TOKENS) == expected


@pytest.mark.parametrize(
    ("dtype", "has_kernels"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("name", ["llama", "mistral, window 9", "qwen2", "qwen3", "llama, tied", *LAYER_NORM_NAMES])
def test_16_bits_stay_close_to_hugging_face(name: str, dtype: torch.dtype, has_kernels: bool) -> None:
    """Where a token differs, Hugging Face in that dtype must have had the two almost level; 3 tokens are required."""
    folder = checkpoint(name)
    reference = reference_model(folder, dtype)
    cpu = cpu_kernels() if has_kernels else None
    runner = load_runner(folder, dtype, cpu=cpu)
    ids = greedy_ids(runner, [PROMPT], NUM_TOKENS)[0]
    assert len(set(ids)) >= 3
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].float()
    spread = logits.std().item()
    gaps = logits.max(dim=1).values - logits.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
    assert gaps.max().item() < (0.1 if dtype == torch.bfloat16 else 0.02) * spread


@pytest.mark.parametrize("name", ["qwen3", *LAYER_NORM_NAMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_neither_chunks_nor_neighbours_nor_threads_nor_capture(dtype: torch.dtype, name: str) -> None:
    folder = checkpoint(name)

    def logits(prompts: list[list[int]], budget: int, num_threads: int, enforce_eager: bool) -> torch.Tensor:
        cpu = cpu_kernels(num_threads=num_threads)
        runner = load_runner(folder, dtype, cpu=cpu, enforce_eager=enforce_eager, block_size=8)
        return logits_after_prompts(runner, prompts, budget)[-1]

    expected = logits([PROMPT], 64, 1, enforce_eager=True)
    assert torch.equal(logits([PROMPT], 64, 2, enforce_eager=False), expected)
    assert torch.equal(logits([PROMPT], 1, 3, enforce_eager=False), expected)
    assert torch.equal(logits([*SHORT_PROMPTS, PROMPT], 7, 2, enforce_eager=True), expected)
    assert torch.equal(logits([*SHORT_PROMPTS, *SHORT_PROMPTS, PROMPT], 64, 2, enforce_eager=False), expected)
    assert torch.equal(logits([*[[5]] * 10, PROMPT], 13, 2, enforce_eager=False), expected)


def test_a_prompt_longer_than_dynamic_rope_s_original_length_uses_one_table() -> None:
    """Up to the original length as Hugging Face; beyond it, the table that Hugging Face makes for max_model_len."""
    folder = checkpoint("llama, dynamic")
    reference = reference_model(folder)
    config = read_model_config(folder, trust_remote_code=False)
    runner = make_runner(config, reference.state_dict(), max_model_len=200, max_num_batched_tokens=200)
    prompt = [(29 * i + 7) % 254 + 2 for i in range(200)]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    assert (last_logits(runner, prompt) - expected).abs().max() < 1e-3


def test_a_tied_head_in_the_file_is_ignored_and_inv_freq_too() -> None:
    config = read_model_config(checkpoint("llama, tied"), trust_remote_code=False)
    model = build_model(config, torch.float32, 128)
    assert "lm_head.weight" not in model.weight_targets()
    assert model.is_ignored("lm_head.weight")
    assert model.is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not model.is_ignored("model.layers.0.self_attn.q_proj.weight")
    untied = build_model(replace(config, tie_word_embeddings=False), torch.float32, 128)
    assert "lm_head.weight" in untied.weight_targets()
    assert not untied.is_ignored("lm_head.weight")


@pytest.mark.parametrize("name", ["qwen3, biases", *LAYER_NORM_NAMES])
def test_weight_targets_are_views_that_cover_every_parameter_once(name: str) -> None:
    config = read_model_config(checkpoint(name), trust_remote_code=False)
    model = build_model(config, torch.float32, 128)
    for number, target in enumerate(model.weight_targets().values()):
        target.fill_(number)
    for number, (name, target) in enumerate(model.weight_targets().items()):
        assert (target == number).all(), name


def test_unknown_architecture_is_refused_with_those_that_run() -> None:
    with pytest.raises(StartupError, match=r"'BananaForCausalLM'.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        model_class("BananaForCausalLM")


@pytest.mark.parametrize(
    ("head_dim", "rope"),
    [
        (2, RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=64)),
        (8, RopeConfig(kind="dynamic", factor=1e300, original_max_position_embeddings=64)),
        (8, RopeConfig(kind="yarn", theta=1.0, factor=2.0, original_max_position_embeddings=64)),
        (8, RopeConfig(kind="linear", factor=1e-45)),
    ],
)
def test_rope_settings_without_finite_angles_are_refused(head_dim: int, rope: RopeConfig) -> None:
    config = read_model_config(checkpoint("llama"), trust_remote_code=False)
    with pytest.raises(StartupError, match=f"no finite angles follow from a head_dim of {head_dim}"):
        build_model(replace(config, head_dim=head_dim, rope=rope), torch.float32, 128)


@pytest.mark.parametrize(
    ("name", "activation", "allowed"), [("llama", "gelu", "silu, swish"), ("gpt2", "silu", "relu, gelu, gelu_python")]
)
def test_other_activation_is_refused(name: str, activation: str, allowed: str) -> None:
    config = read_model_config(checkpoint(name), trust_remote_code=False)
    with pytest.raises(StartupError, match=f"hidden_act '{activation}' is not supported; it may be {allowed}"):
        build_model(replace(config, hidden_act=activation), torch.float32, 128)


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (1, [2**-8]),
        (3, [0.0625, 0.00390625, 0.25]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (12, [*(0.5**i for i in range(1, 9)), 0.707107, 0.353553, 0.176777, 0.088388]),
    ],
)
def test_case_l4_slopes_of_any_number_of_heads(num_heads: int, expected: list[float]) -> None:
    assert alibi_slopes(num_heads) == pytest.approx(expected, rel=1e-5)
