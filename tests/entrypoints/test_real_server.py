"""The real command line with a real engine on tiny models: what clients see of lengths, bad requests and start-up."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import cached_checkpoint, copy_checkpoint, edit_json
from tests.helpers.native_requests import NASTY_PROMPTS
from tests.helpers.server import REAL, Server, assert_refused, run_server, running_server

CONTEXT = 128
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Started as scripts for vLLM 0.2.7 start it: each flag of that release that works here, in both spellings."""
    model = str(cached_checkpoint())
    flags = (
        f"--model {model} --tokenizer {model} --tokenizer_mode auto --load-format auto --dtype float --seed 0 "
        "--max-model-len 128 --block_size 8 --swap-space 4 --gpu-memory-utilization 0.9 --max-num-batched-tokens 64 "
        "--max_num_seqs 8 --max-paddings 256 -pp 1 -tp 1 --disable-log-stats --enforce-eager --trust-remote-code "
        "--max-context-len-to-capture 8192 --engine-use-ray --max-log-len 5 --host 127.0.0.1 --num-kv-blocks 160"
    )
    with running_server(*flags.split(), module=REAL) as server:
        yield server


def num_output_tokens(server: Server, **fields: Any) -> int:
    """Of a stream: as many as it has messages."""
    return len(server.post({**GREEDY, "stream": True, **fields}).messages())


def test_stream_is_cumulative_and_ends_in_the_answer(server: Server) -> None:
    asked = {"prompt": "Hello", "max_tokens": 40, **GREEDY}
    response = server.post({**asked, "stream": True})
    texts = [json.loads(chunk[:-1])["text"][0] for chunk in response.chunks]
    assert response.chunks == [json.dumps({"text": [text]}).encode() + b"\0" for text in texts]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(["Hello", *texts]))
    assert len(texts) == 40
    answer = server.post(asked)
    assert answer.body == json.dumps({"text": [texts[-1]]}, ensure_ascii=False, separators=(",", ":")).encode()
    assert len(set(texts)) > 3


@pytest.mark.parametrize("prompt", [prompt for prompt in NASTY_PROMPTS if prompt])
def test_text_starts_with_the_prompt_as_it_was_sent(server: Server, prompt: str) -> None:
    fields = {"prompt": prompt, "max_tokens": 5, **GREEDY}
    text = server.text(**fields)
    assert text.startswith(prompt)
    assert server.post({**fields, "stream": True}).messages()[-1] == text


def test_lengths(server: Server) -> None:
    """Sixteen tokens by default; null and too much end at the context, never beyond."""
    assert num_output_tokens(server, prompt="x" * 20) == 16
    for max_tokens in (None, 10**9, CONTEXT - 20, CONTEXT - 19):
        assert num_output_tokens(server, prompt="x" * 20, max_tokens=max_tokens) == CONTEXT - 20
    assert num_output_tokens(server, prompt="x" * 20, max_tokens=CONTEXT - 21) == CONTEXT - 21
    assert num_output_tokens(server, prompt="x" * (CONTEXT - 1)) == 1
    for length in (CONTEXT, CONTEXT + 1):
        assert_refused(server.post({"prompt": "x" * length, "stream": True}), 400, str(length), str(CONTEXT))
    assert_refused(server.post({"prompt": "x" * 5000}), 400, "at least", str(CONTEXT))  # not even tokenised
    for max_tokens in (0, -1):
        assert_refused(server.post({"prompt": "x", "max_tokens": max_tokens}), 400, "max_tokens")


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [999999], "min_tokens": 2}, "stop_token_ids"),
        ({"prompt": "a", "logprobs": 100000}, "logprobs"),
        ({"prompt": "a", "n": 100, "temperature": 1}, "n must be at most 8"),
        ({"prompt": "a", "best_of": 9, "use_beam_search": True, "temperature": 0}, "best_of must be at most 8"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "best_of must be 1 when using greedy sampling"),
        ({"prompt": "a", "n": 2, "use_beam_search": True}, "temperature must be 0 when using beam search"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs must be at most 20"),
    ],
)
def test_poisonous_requests_are_refused(server: Server, fields: dict[str, Any], word: str) -> None:
    assert_refused(server.post(fields), 400, word)
    assert_refused(server.post({**fields, "stream": True}), 400, word)
    assert server.get("/health").status == 200


def test_log_line_has_lengths_and_the_wanted_part_of_the_prompt(server: Server) -> None:
    server.text(prompt="mysterious", max_tokens=7, **GREEDY)
    line = server.log.splitlines()[-1]
    assert re.search(r"request \w+: 10 prompt tokens, 7 output tokens, .* length, prompt 'myste'$", line), line


def test_signal_in_mid_stream_leaves_nothing(server: Server) -> None:
    model = str(cached_checkpoint(max_position_embeddings=4096))
    flags = ["--model", model, "--num-kv-blocks", "1024", "--shutdown-grace-s", "0.3"]
    with running_server(*flags, module=REAL) as server, server.connect() as connection:
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 4000, "ignore_eos": True}).encode()
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        received = connection.recv(65536)
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        while data := connection.recv(65536):
            received += data
        assert received.endswith(b'"]}\0\r\n0\r\n\r\n')
        assert server.wait() == 0
        assert time.monotonic() - start < 5
        assert "Traceback" not in server.log
        with pytest.raises(ProcessLookupError):
            os.killpg(server.process.pid, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_demanded_gpu_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = str(cached_checkpoint())
    assert_does_not_start("--model", model, "--device", "cuda", words=["--device cuda: ", "use --device cpu"])


def assert_does_not_start(*flags: str, words: list[str]) -> None:
    start = time.monotonic()
    result = run_server("--port", "0", *flags)
    assert result.returncode == 1, result
    assert result.stdout == ""
    [message] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in message for word in words), message
    assert "Traceback" not in result.stderr
    assert time.monotonic() - start < 45  # a few seconds; ten times that where the tests fill the machine


def test_missing_model_is_named(tmp_path: Path) -> None:
    assert_does_not_start("--model", str(tmp_path / "absent"), words=[str(tmp_path / "absent")])


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint(), tmp_path / "model")
    edit_json(folder / "config.json", architectures=["BananaForCausalLM"])
    assert_does_not_start("--model", str(folder), words=["BananaForCausalLM", "LlamaForCausalLM"])


def test_context_larger_than_the_cache_is_refused() -> None:
    flags = ["--model", str(cached_checkpoint()), "--num-kv-blocks", "4", "--block-size", "8"]
    assert_does_not_start(*flags, words=["128", "32", "--max-model-len", "--num-kv-blocks"])


def test_custom_code_is_refused_without_asking(tmp_path: Path) -> None:
    folder = copy_checkpoint(cached_checkpoint(), tmp_path / "model")
    canary = tmp_path / "canary"
    (folder / "custom.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "custom.Config"}, model_type="custom")
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "custom.Tokenizer"]})
    result = run_server("--port", "0", "--model", str(folder), "--load-format", "safetensors")
    assert not canary.exists()
    assert result.returncode == 1
    assert "--trust-remote-code" in result.stderr
