"""scripts/offline_inference.py on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import offline_inference
from tests.helpers.checkpoints import cached_checkpoint

ENGINE = ["--engine", '{"dtype": "float32", "num_kv_blocks": 64}', "--temperature", "0", "--max-tokens", "5"]


def lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert offline_inference.main(["--model", str(cached_checkpoint()), *ENGINE, *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_prompts_of_the_command_line_and_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text("third\n\nfourth 'é'\n")
    found = lines(["first", "second", "--file", str(tmp_path / "prompts")], capsys)
    assert [line.split(", text: ")[0] for line in found] == [
        "Prompt: 'first'",
        "Prompt: 'second'",
        "Prompt: 'third'",
        "Prompt: \"fourth 'é'\"",
    ]
    assert all(len(line.split(", text: ")[1]) > 2 for line in found)


def test_it_has_prompts_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(lines([], capsys)) == len(offline_inference.PROMPTS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/absent/model"], "/absent/model"),
        (["--file", "/absent/prompts"], "/absent/prompts"),
        (["--top-p", "3"], "top_p must be in (0, 1], got 3.0"),
        (["--engine", '{"self": 1}'], "unknown option 'self'"),
        (["--engine", '{"dtyp": "half"}'], "unknown option 'dtyp'; the nearest known one is 'dtype'"),
        (["x" * 500], "prompts[0]: prompt must leave room"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert offline_inference.main(["--model", str(cached_checkpoint()), *ENGINE, *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "[1]"], "--engine: must be a JSON object, got '[1]'"),
        (["--engine", "{bad"], "--engine: must be a JSON object, got '{bad': Expecting property name"),
        (["--engine", "[" * 100_000], "--engine: must be a JSON object"),
        (["--engine", '{"model": "x"}', "--model", "y"], "--model y and --engine with a 'model' of its own"),
    ],
    ids=["list", "no JSON", "too deep", "two models"],
)
def test_engine_options_must_be_an_object_without_a_second_model(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        offline_inference.main(words)
    assert message in capsys.readouterr().err


def test_the_model_may_be_one_of_the_engine_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = json.dumps({"model": str(cached_checkpoint()), "dtype": "float32", "num_kv_blocks": 64})
    assert offline_inference.main(["--engine", options, "--max-tokens", "2", "Hi"]) == 0
    assert capsys.readouterr().out.startswith("Prompt: 'Hi', text: ")
