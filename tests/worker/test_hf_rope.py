"""Every spelling of RoPE settings, old and new, with transformers as the reference (case L2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.helpers.checkpoints import REMOVED
from tests.worker.test_hf_config import read, write_config
from vllm_lite.config import RopeConfig
from vllm_lite.errors import StartupError

LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"rope_parameters": None},
        {"rope_scaling": {}},
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000.0}},
        {"rope_theta": 70000.0, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}, "rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 100},
        {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3}},
        {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}},
    ],
    ids=str,
)
def test_rope_is_read_as_transformers_reads_it(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_config(tmp_path, max_position_embeddings=256, **changes)
    reference_config: Any = AutoConfig.from_pretrained(folder)
    reference_config.standardize_rope_params()  # as the model does when it is made
    reference: dict[str, Any] = reference_config.rope_parameters
    rope = read(folder).rope

    assert rope.kind == reference["rope_type"]
    assert rope.theta == reference["rope_theta"]
    defaults = RopeConfig()
    for name in (
        "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ):  # fmt: skip
        assert getattr(rope, name) == reference.get(name, getattr(defaults, name)), name
    if rope.kind in ("llama3", "yarn"):
        assert rope.original_max_position_embeddings == reference["original_max_position_embeddings"]
    if rope.kind == "dynamic":
        assert rope.original_max_position_embeddings == 256


def test_settings_nested_by_layer_type_are_read_where_all_layers_agree(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    nested = {"full_attention": linear, "sliding_attention": dict(linear)}

    rope = read(write_config(tmp_path, "Qwen3ForCausalLM", rope_parameters=nested)).rope
    assert rope == RopeConfig(kind="linear", theta=500000.0, factor=4.0)

    nested["sliding_attention"]["factor"] = 2.0
    with pytest.raises(StartupError, match="differs between layers"):
        read(write_config(tmp_path, "Qwen3ForCausalLM", rope_parameters=nested))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["banana", "longrope", "su", "mrope", "proportional", 3])
def test_an_unknown_kind_is_refused_with_the_list_of_those_that_run(kind: Any, key: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, rope_scaling={key: kind, "factor": 2.0})

    with pytest.raises(StartupError, match=f"{kind!r} is not supported; .* default, linear, dynamic, llama3, yarn"):
        read(folder)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"factor": 8.0}, "has a factor but no rope_type"),
        ({"type": "linear"}, "lacks 'factor'"),
        ({"type": "linear", "factor": "two"}, "'factor' must be a number above 0, got 'two'"),
        ({"type": "linear", "factor": 0}, "'factor' must be a number above 0, got 0"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}, "'high_freq_factor' must be above low_freq_factor"),
        ({"rope_type": "yarn", **YARN, "original_max_position_embeddings": -1}, "'original_max_position_embeddings'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ([1], "'rope_scaling' must be an object or null"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_followed_are_refused(rope: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=named):
        read(write_config(tmp_path, rope_scaling=rope, max_position_embeddings=256))


def test_a_missing_theta_is_the_default(tmp_path: Path) -> None:
    assert read(write_config(tmp_path, rope_theta=REMOVED)).rope.theta == 10000.0
    assert read(write_config(tmp_path, rope_theta=None)).rope.theta == 10000.0
