"""Files that use the offline API as vLLM's tutorials do, unchanged but for the import, each in its own process."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from tests.helpers.checkpoints import byte_tokenizer, cached_checkpoint, copy_checkpoint, reference_model
from tests.helpers.server import ROOT

QUICKSTART = """
from vllm_lite import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
EMPTY_PROMPTS = """
from vllm_lite import LLM, SamplingParams

prompts = [""] * 72
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, max_tokens=32)
llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(repr(output.prompt), len(output.outputs[0].token_ids), output.outputs[0].finish_reason)
"""

BEAMS = """
from vllm_lite import LLM, SamplingParams

prompts = [
    "A robot may not injure a human being",
    "To be or not to be,",
    "What is the meaning of life?",
    "It is only with the heart that one can see rightly",
]
sampling_params = SamplingParams(use_beam_search=True, n=4, best_of=4, temperature=0, max_tokens=12)
llm = LLM(model="facebook/opt-125m", dtype="float32")
for output in llm.generate(prompts, sampling_params):
    for candidate in output.outputs:
        print(repr(output.prompt), candidate.index, list(candidate.token_ids), candidate.cumulative_logprob)
        assert llm.get_tokenizer().decode(candidate.token_ids) == candidate.text
"""


def run(code: str, folder: Path, *, adds_bos: bool) -> subprocess.CompletedProcess[str]:
    """Runs a file in a folder that has a model of the tutorials' name, whose tokenizer adds BOS as OPT's does."""
    model = copy_checkpoint(cached_checkpoint(), folder / "facebook" / "opt-125m")
    if adds_bos:
        tokenizer = byte_tokenizer()
        bos = [("</s>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=bos)
        tokenizer.save_pretrained(model)
    (folder / "tutorial.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "tutorial.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_quick_start_runs(tmp_path: Path) -> None:
    result = run(QUICKSTART, tmp_path, adds_bos=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(", Generated text: ")[0] for line in lines] == [
        "Prompt: 'Hello, my name is'",
        "Prompt: 'The president of the United States is'",
        "Prompt: 'The capital of France is'",
        "Prompt: 'The future of AI is'",
    ]
    assert "4/4" in result.stderr and re.search(r"\d tokens/s", result.stderr)
    assert "Traceback" not in result.stderr


def test_beams_are_hugging_face_s(tmp_path: Path) -> None:
    result = run(BEAMS, tmp_path, adds_bos=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 16
    model, tokenizer = reference_model(cached_checkpoint()), byte_tokenizer()
    for start in range(0, 16, 4):
        prompt: str = ast.literal_eval(lines[start].partition(" 0 ")[0])
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected: Any = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                max_new_tokens=12,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        for rank, line in enumerate(lines[start : start + 4]):
            words, _, total = line.removeprefix(f"{prompt!r} {rank} ").rpartition(" ")
            beam: list[int] = ast.literal_eval(words)
            sequence = expected.sequences[rank, ids.shape[1] :].tolist()
            assert sequence == beam + [0] * (len(sequence) - len(beam))
            assert float(total) / len(beam) == pytest.approx(expected.sequences_scores[rank].item(), abs=1e-5)


def test_72_empty_prompts_run_where_the_tokenizer_adds_bos(tmp_path: Path) -> None:
    result = run(EMPTY_PROMPTS, tmp_path, adds_bos=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["'' 32 length"] * 72


def test_an_empty_prompt_of_no_token_is_named(tmp_path: Path) -> None:
    result = run(EMPTY_PROMPTS, tmp_path, adds_bos=False)
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert last_line.endswith("RequestError: prompts[0]: prompt must have at least one token, got one that has none.")


@pytest.mark.parametrize("last_line", ["", "1 / 0"])
def test_a_process_ends_at_once_whatever_happened(tmp_path: Path, last_line: str) -> None:
    """Nobody closes the model, and nothing is printed but what Python itself has to say."""
    code = "from vllm_lite import LLM\nllm = LLM('facebook/opt-125m')\nllm.generate('a', use_tqdm=False)\n"
    result = run(code + last_line, tmp_path, adds_bos=False)
    if last_line:
        assert result.returncode == 1
        assert result.stderr.startswith("Traceback") and result.stderr.count("Traceback") == 1
        assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    else:
        assert (result.returncode, result.stderr) == (0, "")
