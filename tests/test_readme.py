"""The README says what is true: its options table is the configuration's, the files it names exist."""

from __future__ import annotations

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


def write_options_table() -> None:
    table = f"<!-- options -->\n{options_table()}\n<!-- /options -->"
    text = re.sub(r"<!-- options -->\n.*<!-- /options -->", lambda _: table, README, flags=re.DOTALL)
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    write_options_table()
