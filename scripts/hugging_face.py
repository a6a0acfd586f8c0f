"""A model as Hugging Face runs it, to compare with. The engine does not use this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from vllm_lite.config import EngineConfig, ModelConfig
from vllm_lite.worker.checkpoint import open_checkpoint


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The causal model of a folder or a .gguf file, which transformers itself reads only with another package."""
    checkpoint = open_checkpoint(EngineConfig(model=str(path)))
    if checkpoint.gguf_metadata is None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    model = LlamaForCausalLM(_llama_config(checkpoint.config)).to(dtype).eval()
    # A tied head is the embedding itself, and parameters that are shared are listed once.
    checkpoint.load_into({name: parameter.data for name, parameter in model.named_parameters()}, lambda name: False)
    return model


def _llama_config(config: ModelConfig) -> LlamaConfig:
    if (config.architecture, config.rope.kind) != ("LlamaForCausalLM", "default"):
        raise ValueError(f"only plain Llama is compared from GGUF, not {config.architecture} with {config.rope.kind}")
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_theta=config.rope.theta,
        bos_token_id=None,
        eos_token_id=sorted(config.eos_token_ids),
    )
