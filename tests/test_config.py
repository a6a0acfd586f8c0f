from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from vllm_lite.config import (
    EngineConfig,
    ServerConfig,
    config_from_keywords,
    flag_of,
    parse_command_line,
)
from vllm_lite.errors import StartupError


def test_flags_set_their_fields() -> None:
    engine, server = parse_command_line(
        ["--max_num_seqs", "3", "--dtype=half", "--port", "81", "--no-enable-prefix-caching", "--seed=-4"]
    )
    assert (engine.max_num_seqs, engine.torch_dtype_name, engine.enable_prefix_caching) == (3, "float16", False)
    assert (engine.seed, server.port, server.host) == (-4, 81, "127.0.0.1")


def test_every_field_is_a_flag() -> None:
    for cls in (EngineConfig, ServerConfig):
        for f in dataclasses.fields(cls):
            assert f.metadata["help"], f.name
    assert parse_command_line([]) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "7"], r"--block-size.*7.*8, 16, 32"),
        (["--block-size", "x"], r"--block-size.*x"),
        (["--port", "99999"], r"--port must be from 0 to 65535, got 99999"),
        (["--port", "abc"], r"--port.*abc"),
        (["--modle", "x"], r"--modle"),
        (["--max-num-seqs", "0"], r"--max-num-seqs must be from 1 to 2147483647, got 0"),
        (["--gpu-memory-utilization", "nan"], r"--gpu-memory-utilization must be from 0.01 to 1.0, got nan"),
        (["--gpu-memory-utilization", "1.5"], r"--gpu-memory-utilization must be from 0.01 to 1.0, got 1.5"),
        (["-tp", "2"], r"--tensor-parallel-size 2 is not supported yet"),
        (["-pp", "2"], r"--pipeline-parallel-size 2 is not supported yet"),
        (["-q", "awq"], r"--quantization awq is not supported yet"),
        (["--worker-use-ray"], r"--worker-use-ray"),
        (["--dtype", "int8"], r"--dtype.*int8.*float16"),
        (["--ssl-keyfile", "k"], r"--ssl-keyfile and --ssl-certfile"),
        (["--max-model-len", "1"], r"--max-model-len must be from 2 to 2147483647, got 1"),
        (["--num-kv-blocks", "2147483648"], r"--num-kv-blocks must be from 1 to 2147483647"),
        (["--max-model", "5"], r"--max-model"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        parse_command_line(arguments)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"modle": "x"}, "'modle'.*'model'"),
        ({"max_num_seqs": "3"}, "--max-num-seqs must be an integer, got '3'"),
        ({"max_num_seqs": True}, "--max-num-seqs must be an integer, got True"),
        ({"trust_remote_code": 1}, "--trust-remote-code must be true or false, got 1"),
        ({"model": 3}, "--model must be a string, got 3"),
        ({"swap_space": "x"}, "--swap-space must be a number, got 'x'"),
        ({"block_size": 4}, "--block-size must be one of 8, 16, 32, got 4"),
    ],
)
def test_wrong_keywords_are_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        config_from_keywords(EngineConfig, keywords)


def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    return " ".join(capsys.readouterr().out.split())


def test_help_names_the_program_as_it_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_LITE_PROGRAM", raising=False)
    assert help_text(capsys).startswith("usage: python -m vllm_lite.entrypoints.api_server [-h]")
    monkeypatch.setenv("VLLM_LITE_PROGRAM", "../scripts/serve")
    assert help_text(capsys).startswith("usage: ../scripts/serve [-h]")


def test_help_says_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys)
    assert "(default: None)" not in text and "(default: ())" not in text
    assert not re.search(r"\(default: [^)]*\) \(default", text)
    assert "--port PORT port to listen on; 0 takes a free one (default: 8000)" in text


def test_wrong_origins_are_named() -> None:
    assert parse_command_line(["--allowed-origins", "http://a, http://b"])[1].allowed_origins == (
        "http://a",
        "http://b",
    )
    for origins in ("*", "null", "https://a.example:8443/", "http://[::1]:80"):
        ServerConfig(allowed_origins=(origins,))
    for origin in ("a", "http://", "http://a/b", "http:/a"):
        with pytest.raises(StartupError, match=f"--allowed-origins must be like .*got '{origin}'"):
            ServerConfig(allowed_origins=(origin,))
    with pytest.raises(StartupError, match="--allowed-origins must be a tuple of strings"):
        ServerConfig(allowed_origins="http://a")  # type: ignore[arg-type]


def test_fields_without_effect_are_known() -> None:
    assert EngineConfig().fields_without_effect() == []
    assert EngineConfig(swap_space=8, engine_use_ray=True).fields_without_effect() == ["swap_space", "engine_use_ray"]


def test_flag_names() -> None:
    assert flag_of("max_model_len") == "--max-model-len"
