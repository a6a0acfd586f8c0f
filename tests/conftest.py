"""Settings of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Several test processes share the cores, and tiny models gain nothing from a second thread. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# That of the developer's own servers: tests send none.
os.environ.pop("VLLM_LITE_API_KEY", None)

SLOW_FILES = (
    "test_sanitizers.py",
    "test_default_model.py",
    "test_docs_in_browser.py",
    "test_faults.py",
    "test_pauses.py",
    "test_quick_start.py",
    "test_engine_on_emulator.py",
)
"""Where a single file takes a minute: they begin first, so that no process ends with one while the other is idle."""


ENGINE_TESTS = Path(__file__).parent / "engine"
"""What the coverage of the engine is that of: its own tests. Watching the lines of all others costs a fifth of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first; the rest stays in order."""
    for item in items:
        if ENGINE_TESTS not in item.path.parents:
            item.add_marker("no_cover")
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)
