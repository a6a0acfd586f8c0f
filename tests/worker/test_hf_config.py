"""config.json and generation_config.json: sizes, windows, biases, end tokens, with transformers as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.helpers.checkpoints import REMOVED
from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.worker.hf_config import derived_max_model_len, read_model_config

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ARCHITECTURES = list(MODEL_TYPES)
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 32,
}  # fmt: skip


def write_config(folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
    values = {"architectures": [architecture], "model_type": MODEL_TYPES.get(architecture, "?"), **SIZES, **changes}
    kept = {key: value for key, value in values.items() if value is not REMOVED}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def read(folder: Path, *, trust_remote_code: bool = False) -> ModelConfig:
    return read_model_config(folder, trust_remote_code=trust_remote_code)


def reference_windows(reference: Any) -> tuple[int | None, ...]:
    """What transformers' attention layers are given."""
    layer_types = getattr(reference, "layer_types", None)
    if layer_types is None:
        window: int | None = reference.sliding_window if reference.model_type == "mistral" else None
        return tuple(window for _ in range(reference.num_hidden_layers))
    return tuple(reference.sliding_window if name == "sliding_attention" else None for name in layer_types)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 8},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 512},
        {"rope_theta": 500000.0},
        {"sliding_window": None},
        {"sliding_window": 7},
        {"sliding_window": 7, "use_sliding_window": True},
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
        {"dtype": "bfloat16"},
        {"torch_dtype": "float16"},
    ],
    ids=str,
)
def test_the_configuration_is_read_as_transformers_reads_it(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, architecture, **changes)
    reference: Any = AutoConfig.from_pretrained(folder)
    config = read(folder)

    assert config.architecture == architecture
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.intermediate_size == reference.intermediate_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == getattr(reference, "head_dim", reference.hidden_size // reference.num_attention_heads)
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.sliding_windows == reference_windows(reference)
    assert config.hidden_act == reference.hidden_act
    dtype = reference.dtype
    assert config.dtype == (None if dtype is None else str(dtype).removeprefix("torch."))


def test_null_for_the_number_of_kv_heads_means_as_many_as_heads(tmp_path: Path) -> None:
    assert read(write_config(tmp_path, "Qwen2ForCausalLM", num_key_value_heads=None)).num_kv_heads == 32


def test_layer_types_decide_which_layers_have_a_window(tmp_path: Path) -> None:
    layer_types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    folder = write_config(
        tmp_path, "Qwen3ForCausalLM", layer_types=layer_types, sliding_window=9, use_sliding_window=True
    )

    assert read(folder).sliding_windows == (9, None, None, 9)
    assert reference_windows(AutoConfig.from_pretrained(folder)) == (9, None, None, 9)


@pytest.mark.parametrize(
    ("architecture", "changes", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_those_of_the_architecture(
    architecture: str, changes: dict[str, Any], biases: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    config = read(write_config(tmp_path, architecture, **changes))

    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (1, 1, {1}),
        ([0, 1], REMOVED, {0, 1}),
        (REMOVED, [0, 1], {0, 1}),
        (0, [0, 1], {0, 1}),
        ([0, 5], [1], {0, 1, 5}),
        (7, None, {7}),
        (None, 3, {3}),
        (None, None, set()),
        (REMOVED, REMOVED, {2}),
    ],
)
def test_end_tokens_are_the_union_over_both_files(
    in_config: Any, in_generation_config: Any, expected: set[int], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, eos_token_id=in_config)
    if in_generation_config is not REMOVED:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))

    assert read(folder).eos_token_ids == expected


def test_a_generation_config_without_end_token_changes_nothing(tmp_path: Path) -> None:
    folder = write_config(tmp_path, eos_token_id=4)
    (folder / "generation_config.json").write_text("{}")

    assert read(folder).eos_token_ids == {4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": REMOVED}, "lacks 'hidden_size'"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be an integer of at least 1, got 0"),
        ({"num_attention_heads": "many"}, "'num_attention_heads' .* got 'many'"),
        ({"vocab_size": True}, "'vocab_size' .* got True"),
        ({"vocab_size": 2**31}, "'vocab_size' must be at most 2147483647, got 2147483648"),
        ({"num_hidden_layers": 2**31 - 1}, "'num_hidden_layers' must be at most 10000"),
        ({"num_attention_heads": 2**31 - 1, "head_dim": 8}, "'num_attention_heads' must be at most 100000"),
        ({"rms_norm_eps": 1e308}, r"'rms_norm_eps' must be at most 3.4e\+38, got 1e\+308"),
        ({"rms_norm_eps": 10**400}, r"'rms_norm_eps' must be at most 3.4e\+38"),
        ({"rms_norm_eps": float("inf")}, r"'rms_norm_eps' must be at most 3.4e\+38, got inf"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide .* 32; it may be 1, 2, 4, 8, 16, 32"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size 64 is not a multiple .* 7"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": -1.0}, "'rms_norm_eps' must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number above 0, got nan"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token id or a list"),
        ({"architectures": REMOVED}, "lacks 'architectures'"),
        ({"architectures": []}, "'architectures' must be"),
        ({"architectures": ["BananaForCausalLM"]}, "'BananaForCausalLM' is not supported; supported are LlamaForC"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization 'gptq' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq' is not supported"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map.*--trust-remote-code"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, **changes)

    with pytest.raises(StartupError, match=named) as caught:
        read(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"]}, "'layer_types' must be a list of 4 names"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "give no window"),
        ({"max_window_layers": "all"}, "'max_window_layers' must be an integer"),
        ({"sliding_window": 0, "use_sliding_window": True}, "'sliding_window' must be an integer of at least 1"),
    ],
)
def test_windows_that_make_no_sense_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=named):
        read(write_config(tmp_path, "Qwen2ForCausalLM", **changes))


def test_code_of_a_checkpoint_never_runs_even_where_it_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    folder = write_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Model"})

    assert read(folder, trust_remote_code=True).architecture == "LlamaForCausalLM"
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "config.json is missing"),
        ("{", "cannot be read as JSON"),
        ("[1]", "must hold a JSON object, not list"),
        (b"\xff\xfe", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_broken_file_is_named(content: str | bytes | None, named: str, tmp_path: Path) -> None:
    if content is not None:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / "config.json").write_bytes(data)

    with pytest.raises(StartupError, match=named):
        read(tmp_path)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "linear", "factor": 2.5}, 1280),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "linear", "factor": 1e30}, 2**31 - 1),
        ({"rope_type": "yarn", "factor": 1e30}, 2**31 - 1),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_the_context_grows_by_the_factor_where_it_is_meant_to(rope: Any, expected: int, tmp_path: Path) -> None:
    folder = write_config(tmp_path, max_position_embeddings=512, rope_scaling=rope)

    assert derived_max_model_len(read(folder)) == expected
