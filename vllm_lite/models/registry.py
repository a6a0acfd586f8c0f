"""Which architectures run. Knows their names and what of their configurations is supported."""

from __future__ import annotations

import torch

from vllm_lite.config import ModelConfig
from vllm_lite.errors import StartupError
from vllm_lite.layers.context import LayerOptions, NewMemory
from vllm_lite.models.bloom import BloomForCausalLM
from vllm_lite.models.causal_lm import CausalLM
from vllm_lite.models.gpt2 import GPT2LMHeadModel
from vllm_lite.models.gpt_neox import GPTNeoXForCausalLM
from vllm_lite.models.llama import LlamaForCausalLM
from vllm_lite.models.mistral import MistralForCausalLM
from vllm_lite.models.opt import OPTForCausalLM
from vllm_lite.models.qwen2 import Qwen2ForCausalLM
from vllm_lite.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    cls.__name__: cls
    for cls in (
        BloomForCausalLM,
        GPT2LMHeadModel,
        GPTNeoXForCausalLM,
        LlamaForCausalLM,
        MistralForCausalLM,
        OPTForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
    )
}


def model_class(architecture: str) -> type[CausalLM]:
    """Raises StartupError for an architecture that does not run here."""
    if architecture not in MODELS:
        raise StartupError(
            f"architecture {architecture!r} is not supported; those that run are {', '.join(sorted(MODELS))}."
        )
    return MODELS[architecture]


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device | None = None,
    panel_rows: int = 1,
    new_memory: NewMemory | None = None,
) -> CausalLM:
    """The model with uninitialised parameters; `panel_rows` and `new_memory` as in `LayerOptions`.

    Raises StartupError for what does not run here.
    """
    cls = model_class(config.architecture)
    if config.hidden_act not in cls.hidden_acts:
        raise StartupError(
            f"{config.architecture} with hidden_act {config.hidden_act!r} is not supported; "
            f"it may be {', '.join(cls.hidden_acts)}."
        )
    options = LayerOptions(dtype, device or torch.device("cpu"), panel_rows, new_memory=new_memory)
    return cls(config, options, max_model_len)
