"""scripts/offline_inference.py on a tiny model."""

from __future__ import annotations

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
        (["--engine", '{"dtyp": "half"}'], "unknown option 'dtyp'; the nearest known one is 'dtype'"),
        (["x" * 500], "prompts[0]: prompt must leave room"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert offline_inference.main(["--model", str(cached_checkpoint()), *ENGINE, *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_engine_options_must_be_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[1]", "{"):
        with pytest.raises(SystemExit):
            offline_inference.main(["--engine", text])
        assert "--engine" in capsys.readouterr().err
