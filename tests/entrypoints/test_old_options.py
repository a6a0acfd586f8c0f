"""Every option of vLLM 0.2.7 at both doors, the command line and `LLM(...)`: works, is without effect, or is refused.

What an option that works does is tested where it is done; here it arrives, under the same name and with the same value.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from tests.helpers.checkpoints import cached_checkpoint
from vllm_lite import LLM
from vllm_lite.config import EngineConfig, parse_command_line
from vllm_lite.entrypoints import launch
from vllm_lite.entrypoints import llm as llm_module
from vllm_lite.entrypoints.native.routes import NATIVE
from vllm_lite.errors import StartupError


@dataclass(frozen=True)
class Option:
    flag: str
    """As old scripts spell it."""
    value: Any
    verdict: Literal["works", "no effect", "refused", "server"]
    """Those of the server are unknown to `LLM`."""
    name: str = ""
    """Of the field, where the flag is short."""

    @property
    def keyword(self) -> str:
        return self.name or self.flag.removeprefix("--").replace("-", "_")

    def spellings(self) -> list[list[str]]:
        if self.value is True:
            return [[self.flag], [_with_underscores(self.flag)]]
        if not self.flag.startswith("--"):
            return [[self.flag, str(self.value)]]
        other = _with_underscores(self.flag)
        return [[self.flag, str(self.value)], [f"{self.flag}={self.value}"], [other, str(self.value)]]


def _with_underscores(flag: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_")


OPTIONS = [
    Option("--model", "m", "works"),
    Option("--tokenizer", "t", "works"),
    Option("--revision", "r", "works"),
    Option("--tokenizer-revision", "r", "works"),
    Option("--tokenizer-mode", "slow", "works"),
    Option("--trust-remote-code", True, "works"),
    Option("--download-dir", "d", "works"),
    *(Option("--load-format", name, "works") for name in ("auto", "pt", "safetensors", "gguf", "dummy", "npcache")),
    *(Option("--dtype", name, "works") for name in ("auto", "half", "float16", "bfloat16", "float", "float32")),
    Option("--max-model-len", 64, "works"),
    Option("--worker-use-ray", True, "refused"),
    Option("--pipeline-parallel-size", 1, "works"),
    Option("--pipeline-parallel-size", 2, "refused"),
    Option("-pp", 2, "refused", "pipeline_parallel_size"),
    Option("--tensor-parallel-size", 1, "works"),
    Option("--tensor-parallel-size", 2, "refused"),
    Option("-tp", 2, "refused", "tensor_parallel_size"),
    Option("--max-parallel-loading-workers", 2, "no effect"),
    *(Option("--block-size", size, "works") for size in (8, 16, 32)),
    Option("--seed", 7, "works"),
    Option("--swap-space", 8, "no effect"),
    Option("--gpu-memory-utilization", 0.5, "works"),
    Option("--max-num-batched-tokens", 100, "works"),
    Option("--max-num-seqs", 3, "works"),
    Option("--max-paddings", 9, "no effect"),
    Option("--disable-log-stats", True, "works"),
    Option("--quantization", "awq", "refused"),
    Option("-q", "gptq", "refused", "quantization"),
    Option("--enforce-eager", True, "works"),
    Option("--max-context-len-to-capture", 77, "no effect"),
    Option("--engine-use-ray", True, "no effect"),
    Option("--disable-log-requests", True, "works"),
    Option("--max-log-len", 10, "works"),
    Option("--host", "0.0.0.0", "server"),
    Option("--port", 0, "server"),
    Option("--ssl-keyfile", "k.pem", "server"),
    Option("--ssl-certfile", "c.pem", "server"),
]
IDS = [f"{option.flag.lstrip('-')}-{option.value}" for option in OPTIONS]
OF_THE_PROTOCOL = """
--model --tokenizer --revision --tokenizer-revision --tokenizer-mode --trust-remote-code --download-dir --load-format
--dtype --max-model-len --worker-use-ray --pipeline-parallel-size -pp --tensor-parallel-size -tp
--max-parallel-loading-workers --block-size --seed --swap-space --gpu-memory-utilization --max-num-batched-tokens
--max-num-seqs --max-paddings --disable-log-stats --quantization -q --enforce-eager --max-context-len-to-capture
--engine-use-ray --disable-log-requests --max-log-len --host --port --ssl-keyfile --ssl-certfile
"""


def test_no_option_is_forgotten() -> None:
    assert {option.flag for option in OPTIONS} == set(OF_THE_PROTOCOL.split())


class Arrived(Exception):
    """Carries what the engine would be built from."""


def arrive(config: EngineConfig) -> Any:
    raise Arrived(config)


def through_the_command_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(launch, "_configure_logging", lambda level: None)  # it would outlive the test
    with pytest.raises(Arrived) as found:
        launch._run([*words, *([] if "--port" in words else ["--port", "0"])], arrive, NATIVE)
    config = found.value.args[0]
    assert isinstance(config, EngineConfig)
    return config


def through_the_keyword(option: Option, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(llm_module, "build_parts", arrive)
    with pytest.raises(Arrived) as found:
        LLM(**{option.keyword: option.value})
    config = found.value.args[0]
    assert isinstance(config, EngineConfig)
    return config


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged since the last call."""
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return messages


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_both_doors_take_or_refuse_it_alike(
    option: Option, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="vllm_lite")
    full_flag = "--" + option.keyword.replace("_", "-")
    if option.verdict == "refused":
        message = f"^{full_flag} {option.value} is not supported yet; leave {full_flag} out.$"
        for words in option.spellings():
            with pytest.raises(StartupError, match=message):
                launch._run(words, arrive, NATIVE)
        with pytest.raises(StartupError, match=message):
            LLM(**{option.keyword: option.value})
        return
    has_effect = option.verdict != "no effect"
    for words in option.spellings():
        if option.keyword.startswith("ssl"):
            continue  # both are needed; see test_launch.py
        config = through_the_command_line(words, monkeypatch)
        if option.verdict == "server":
            assert getattr(parse_command_line(words)[1], option.keyword) == option.value
        else:
            assert getattr(config, option.keyword) == option.value
        assert notes(caplog) == ([] if has_effect else [f"accepted without effect: {full_flag}"])
    if option.verdict == "server":
        with pytest.raises(StartupError, match=f"unknown option '{option.keyword}'; the nearest known one is "):
            LLM(**{option.keyword: option.value})
        return
    assert through_the_keyword(option, monkeypatch) == config
    has_effect = has_effect and option.keyword != "max_log_len"  # there are no requests to log
    assert notes(caplog) == ([] if has_effect else [f"accepted without effect: {option.keyword}"])


def test_all_that_work_together_make_a_model() -> None:
    """The keywords of the server's twin in test_real_server.py."""
    folder = str(cached_checkpoint())
    with LLM(
        folder,
        folder,
        tokenizer_mode="auto",
        trust_remote_code=True,
        load_format="auto",
        dtype="float",
        max_model_len=100,
        pipeline_parallel_size=1,
        tensor_parallel_size=1,
        block_size=8,
        seed=0,
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        disable_log_stats=True,
        enforce_eager=True,
        disable_log_requests=True,
    ) as llm:
        (output,) = llm.generate(prompt_token_ids=[[5] * 90], use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 10
