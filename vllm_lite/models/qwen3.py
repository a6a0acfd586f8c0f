"""Qwen3: Llama with normalised queries and keys, which `ModelConfig` states."""

from __future__ import annotations

from vllm_lite.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Differs from Llama in its configuration alone."""
