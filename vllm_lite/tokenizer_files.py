"""Reads the small files beside a tokenizer: JSON, and the chat template. Knows no library and renders nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_lite.errors import StartupError


@dataclass(frozen=True)
class TemplateText:
    """The chat template of a checkpoint, or what is wrong with it; both are None where it has none."""

    text: str | None = None
    problem: str | None = None


def default_template(found: object) -> TemplateText:
    """Of what a checkpoint may hold: a template, several by name, or a list of `{"name": ..., "template": ...}`."""
    if isinstance(found, list):
        is_named = all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in found)
        if not is_named:
            return TemplateText(problem="it is a list whose entries are not all a name and a template")
        found = {str(entry["name"]): entry["template"] for entry in found}
    if isinstance(found, Mapping):
        if "default" not in found:
            names = ", ".join(map(repr, found)) or "none"
            return TemplateText(problem=f"there are several by name ({names}), and none of them is 'default'")
        found = found["default"]
    if found is None or isinstance(found, str):
        return TemplateText(found)
    return TemplateText(problem=f"it is {type(found).__name__} instead of text")


def read_chat_template(folder: Path) -> TemplateText:
    """What transformers takes from a folder: its .jinja files, or else the entry of tokenizer_config.json.

    Where there is neither, the old chat_template.json counts, which transformers reads for processors only.
    """
    paths = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    paths["default"] = folder / "chat_template.jinja"
    try:
        texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
        config = read_json(folder / "tokenizer_config.json").get("chat_template")
        return default_template(texts or config or read_json(folder / "chat_template.json").get("chat_template"))
    except (OSError, UnicodeDecodeError, StartupError) as error:
        return TemplateText(problem=str(error))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file. Raises StartupError for a file that holds no object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} holds no JSON object.")
    return content
