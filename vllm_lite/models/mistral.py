"""Mistral: Llama with a sliding window, which `ModelConfig` states."""

from __future__ import annotations

from vllm_lite.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Differs from Llama in its configuration alone."""
