"""Qwen2: Llama with biases on queries, keys and values and windows on some layers, which `ModelConfig` states."""

from __future__ import annotations

from vllm_lite.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Differs from Llama in its configuration alone."""
