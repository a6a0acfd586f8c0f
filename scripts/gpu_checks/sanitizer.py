"""Runs every kernel under NVIDIA's compute-sanitizer, where that starts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from scripts.gpu_checks.outcome import Outcome

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
SUBJECT = [sys.executable, "-m", "scripts.gpu_check", "--only", "every kernel"]


def check_sanitizer(
    tool: str, subject: Sequence[str] = SUBJECT, find: Callable[[str], str | None] = shutil.which
) -> Outcome:
    """`tool` is memcheck or racecheck. The driver of checks limits the time."""
    program = find("compute-sanitizer")
    if program is None:
        return Outcome("unavailable", "compute-sanitizer is not installed")
    command = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "99", *subject]
    result = subprocess.run(command, capture_output=True, text=True)
    return read_report(result.returncode, result.stdout + result.stderr)


def read_report(exit_code: int, output: str) -> Outcome:
    """A sanitizer that cannot watch this machine's GPU, or whose subject ends before it has counted, is unavailable."""
    figures = {"exit_code": exit_code, "output": output[-4000:]}
    refusal = re.search(
        r"^.*(?:not supported|Unable to|Failed to initialize|could not).*$", output, re.MULTILINE | re.I
    )
    counts = [int(count) for count in SUMMARY.findall(output)]
    if not counts or (refusal and exit_code != 0 and not any(counts)):
        reason = refusal[0].strip("= \n") if refusal else f"no summary, exit code {exit_code}"
        return Outcome("unavailable", f"compute-sanitizer does not work here: {reason}", figures)
    if any(counts):
        return Outcome("failed", f"{sum(counts)} errors or hazards", figures)
    if exit_code != 0:
        return Outcome("failed", f"what it watched ended with exit code {exit_code}", figures)
    return Outcome("ok", "no errors", figures)
