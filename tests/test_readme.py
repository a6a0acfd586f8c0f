"""The README says what is true: its options table is the configuration's, the files it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from vllm_lite.config import options_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_options_table_is_current() -> None:
    match = re.search(r"<!-- options -->\n(.*)<!-- /options -->", README, flags=re.DOTALL)
    assert match is not None
    assert match[1].strip() == options_table(), "run: python -m tests.test_readme"


def test_named_files_exist() -> None:
    for name in re.findall(r"`((?:scripts|models|worker|engine|entrypoints|ops|layers|tests)/[\w/.]*)`", README):
        assert (ROOT / name).exists() or (ROOT / "vllm_lite" / name).exists(), name


def test_named_tests_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", README))
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 8
    assert not named - set(re.findall(r"^(?:async )?def (test_\w+)", source, flags=re.MULTILINE))


def test_the_path_of_a_request_names_functions_that_exist() -> None:
    section = README.partition("## The path of a request")[2].partition("\n## ")[0]
    named = [name for name in re.findall(r"`(\w+\.\w+)`", section) if not name.endswith(".py")]
    assert len(named) > 8
    assert not set(named) - defined_names()


def defined_names() -> set[str]:
    """`module.function` and `Class.method` of the whole package."""
    names = set()
    for path in (ROOT / "vllm_lite").rglob("*.py"):
        body = ast.parse(path.read_text()).body
        owners = [(path.stem, body)] + [(node.name, node.body) for node in body if isinstance(node, ast.ClassDef)]
        for owner, nodes in owners:
            functions = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
            names |= {f"{owner}.{function.name}" for function in functions}
    return names


def write_options_table() -> None:
    table = f"<!-- options -->\n{options_table()}\n<!-- /options -->"
    text = re.sub(r"<!-- options -->\n.*<!-- /options -->", lambda _: table, README, flags=re.DOTALL)
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    write_options_table()
