"""Contenders in turn: A B A B, each on the same prompts, disturbed runs repeated, a line printed for each run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.contenders import Contender
from scripts.bench.figures import UNITS, Spread, figures, ratios, spreads
from scripts.bench.quiet import Limits, Measured, take_sample, undisturbed
from scripts.bench.workloads import Prompt, Workload

COMPARED = (
    ("engine", "transformers"),
    ("engine", "peer"),
    ("engine", "peer-stream"),
    ("http", "engine"),
    ("http-stream", "engine"),
    ("http", "peer"),
    ("http-stream", "peer-stream"),
)
"""Whose ratios are taken by default, where both take part."""


@dataclass(frozen=True)
class Rounds:
    """How runs are watched and reported."""

    limits: Limits
    peer_ids: tuple[int, ...] = ()
    """Processes, beside this one and its children, whose work is no disturbance: those of the peer."""
    compared: tuple[tuple[str, str], ...] = COMPARED
    """Whose ratios are taken, where both take part."""

    def run(
        self, label: str, workload: Workload, contender: Contender, prompts: Sequence[Prompt]
    ) -> Measured[dict[str, float]]:
        """The figures of one run."""
        ours = (os.getpid(), *self.peer_ids)
        measured = undisturbed(
            lambda: figures(workload, contender.run(workload, prompts)), lambda: take_sample(ours), self.limits
        )
        print(run_line(label, contender.name, measured), flush=True)
        return measured

    def measure(
        self, workload: Workload, contenders: Sequence[Contender], prompts: Sequence[Sequence[Prompt]]
    ) -> dict[str, Any]:
        """One round for each of `prompts`, in each all contenders in turn; figures, ratios and how quiet it was."""
        measured: dict[str, list[Measured[dict[str, float]]]] = {contender.name: [] for contender in contenders}
        for index, same_prompts in enumerate(prompts):
            for contender in contenders:
                run = self.run(f"{workload.name}, round {index + 1}", workload, contender, same_prompts)
                measured[contender.name].append(run)
        values = {name: [run.value for run in runs] for name, runs in measured.items()}
        return {
            "prompts": workload.num_prompts,
            "prompt_tokens": workload.prompt_len,
            "output_tokens": workload.output_len,
            "contenders": {
                name: {"figures": spreads(values[name]), "rounds": values[name], **quietness(runs)}
                for name, runs in measured.items()
            },
            "ratios": {
                f"{a} / {b}": ratios(values[a], values[b]) for a, b in self.compared if a in values and b in values
            },
        }


def quietness(runs: Sequence[Measured[dict[str, float]]]) -> dict[str, Any]:
    """How much others disturbed the runs that count, and how many were thrown away."""
    return {
        "foreign_cores": [round(run.foreign, 3) for run in runs],
        "load": [round(run.load, 2) for run in runs],
        "num_disturbed": sum(run.is_disturbed for run in runs),
        "num_discarded": sum(run.num_discarded for run in runs),
    }


def run_line(label: str, name: str, measured: Measured[dict[str, float]]) -> str:
    """A line for a run."""
    values = "   ".join(f"{value:8.1f} {UNITS[figure]}" for figure, value in measured.value.items())
    marks = [f"others {measured.foreign:.2f} cores", f"load {measured.load:.1f}"]
    if measured.num_discarded:
        marks.append(f"{measured.num_discarded} discarded")
    if measured.is_disturbed:
        marks.append("DISTURBED")
    return f"{label:18} {name:12} {values}   ({', '.join(marks)})"


def summary(results: dict[str, Any]) -> str:
    """Medians with least and greatest of `Rounds.measure`, contenders first, ratios after them."""
    lines = []
    for name, contender in results["contenders"].items():
        mark = f"   {contender['num_disturbed']} DISTURBED" if contender["num_disturbed"] else ""
        for figure, values in contender["figures"].items():
            lines.append(f"  {name:26} {spread_text(values, 1)} {UNITS[figure]}{mark}")
    for name, ratio in results["ratios"].items():
        for figure, values in ratio.items():
            lines.append(f"  {name:26} {spread_text(values, 3)} times the {UNITS[figure]}")
    return "\n".join(lines)


def spread_text(values: Spread, digits: int) -> str:
    """`median (min to max)`."""
    low, median, high = (f"{values[name]:.{digits}f}" for name in ("min", "median", "max"))
    return f"{median:>9} ({low} to {high})"
