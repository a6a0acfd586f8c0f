"""Garbage collections hold up every stream, so they leave out what lives as long as the server."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lite.entrypoints.launch import ServerProgram, main
from vllm_lite.errors import StartupError


def test_what_has_been_loaded_is_not_looked_at_again(capsys: pytest.CaptureFixture[str]) -> None:
    held = [[number] for number in range(1000)]

    def build(config: Any) -> Any:
        return SimpleNamespace(engine=None, model_name="loaded", held=held)

    def make_app(service: Any) -> Any:
        looked_at = {id(one) for one in gc.get_objects()}
        raise StartupError(f"{sum(id(one) in looked_at for one in held)} of {len(held)}")

    held_ids = {id(one) for one in held}
    before = sum(id(one) in held_ids for one in gc.get_objects())
    try:
        assert main(["--port", "0"], build, ServerProgram("m", "d", make_app, "/", {})) == 1
    finally:
        gc.unfreeze()
    assert before == len(held)
    assert capsys.readouterr().err.endswith("error: 0 of 1000\n")
