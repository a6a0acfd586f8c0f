"""Programs that a test needs and pip cannot install: nginx, a browser. Where they are missing, tests skip or fail."""

from __future__ import annotations

import os
import shutil

import pytest

MUST_BE_THERE = "VLLM_LITE_TEST_NEEDS_PROGRAMS"
"""Set in the environment, a missing program is a failure: no check is left out where all are to run."""


def find_program(*names: str, package: str) -> str:
    """The path of the first that is installed; `package` is Debian's."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin"
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    reason = f"no {' or '.join(names)} on PATH (Debian: {package})"
    if os.environ.get(MUST_BE_THERE):
        pytest.fail(reason)
    pytest.skip(reason)
