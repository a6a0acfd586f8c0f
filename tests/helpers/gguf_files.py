"""Writes Hugging Face models as GGUF files, the way llama.cpp's converter lays them out. Uses the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def halves_to_interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter does to q and k of a llama: the two halves of a head's rows become neighbours."""
    shape = (num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    reordered: np.ndarray = rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)
    return reordered


def metadata_of(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """The keys that say what the model is, with their prefix."""
    config: Any = model.config
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": head_dim,
    }
    if head_dim * config.num_attention_heads != config.hidden_size:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return {f"{architecture}.{key}": value for key, value in values.items()}


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """float32 tensors under their GGUF names, rows of q and k reordered for a llama."""
    config: Any = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = halves_to_interleaved(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = halves_to_interleaved(values, config.num_key_value_heads)
        tensors[gguf_name(name)] = values
    return tensors


def write_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    *,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes a model; `matrix_type` is the type of what has two dimensions. `metadata` and `tensors` add or replace."""
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)  # writes general.architecture itself
    keys = {**metadata_of(model, architecture), "tokenizer.ggml.eos_token_id": 1, **(metadata or {})}
    for key, value in keys.items():
        _add(writer, key, value)
    for name, values in {**gguf_tensors(model, architecture), **(tensors or {})}.items():
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quantize(values, matrix_type), raw_dtype=matrix_type)
        else:
            writer.add_tensor(name, values)
    write(writer)
    return path


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def expanded(values: torch.Tensor, tensor_type: gguf.GGMLQuantizationType) -> torch.Tensor:
    """What is left of values that went through a type, by the gguf package."""
    quantised = gguf.quantize(values.float().numpy(), tensor_type)
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(quantised, tensor_type)).reshape(values.shape))
