"""A picture of a load: how long requests took, and how many tokens came over time. Needs matplotlib."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from scripts.bench.figures import PERCENTILES
from scripts.bench.load import TIMES, Load, milliseconds

MISSING = f"--plot needs matplotlib, which is not installed: {sys.executable} -m pip install 'matplotlib>=3.7'"
MAX_BINS = 60
LEAST_BIN_S = 0.1
ROOM_FOR_LEGEND = 1.25
PANELS = ("first_token_ms", "inter_token_ms", "end_to_end_ms")


def find_matplotlib() -> ModuleType:
    """`matplotlib.figure`, which draws without a screen. Raises ValueError where it is missing."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(MISSING) from error


def write_plot(path: Path, title: str, load: Load) -> None:
    """Writes a PNG. Raises ValueError where nothing was answered."""
    if not load.answered:
        raise ValueError("no request was answered: there is nothing to plot")
    figure = find_matplotlib().Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2).flat
    times = milliseconds(load)
    for panel, name in zip(axes, PANELS):
        _draw_distribution(panel, TIMES[name], times[name])
    _draw_over_time(axes[3], load)
    figure.savefig(path, dpi=120, format="png")


def _draw_distribution(panel: Any, label: str, values: list[float]) -> None:
    """The share of values that are at most so large, with the percentiles marked."""
    panel.set_title(label)
    panel.set_xlabel("ms")
    panel.set_ylabel("share of values at or below")
    panel.grid(alpha=0.3)
    panel.set_ylim(0, 1.02)
    if not values:
        panel.text(0.5, 0.5, "no values", ha="center", transform=panel.transAxes)
        return
    ordered = np.sort(values)
    panel.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", linewidth=2)
    for share, colour in zip(PERCENTILES, ("tab:green", "tab:orange", "tab:red")):
        value = float(np.percentile(ordered, share))
        panel.axvline(value, color=colour, linestyle="--", label=f"p{share}: {value:,.1f} ms")
    panel.set_xlim(left=0)
    panel.legend(loc="lower right", framealpha=1)


def _draw_over_time(panel: Any, load: Load) -> None:
    """Tokens a second in bins of the run, and the number of requests under way."""
    times = np.concatenate([outcome.token_times for outcome in load.answered])
    num_bins = max(1, min(MAX_BINS, int(load.seconds / LEAST_BIN_S)))
    counts, edges = np.histogram(times, bins=num_bins, range=(0.0, load.seconds))
    speeds = counts / np.diff(edges)
    panel.stairs(speeds, edges, fill=True, alpha=0.5, label="tokens per second")
    panel.axhline(len(times) / load.seconds, color="tab:blue", linestyle="--", label="its mean")
    panel.set_title(f"throughput: {len(times):,} tokens in {load.seconds:,.1f} s")
    panel.set_xlabel("seconds since the start")
    panel.set_ylabel("tokens per second")
    panel.set_xlim(0, load.seconds)
    panel.set_ylim(0, ROOM_FOR_LEGEND * speeds.max())
    panel.grid(alpha=0.3)
    changes = [(outcome.begin_s, 1) for outcome in load.outcomes] + [(outcome.end_s, -1) for outcome in load.outcomes]
    moments, steps = zip(*sorted(changes))
    under_way = np.cumsum(steps)
    other = panel.twinx()
    other.step(moments, under_way, where="post", color="tab:red", linewidth=1, label="requests under way")
    other.set_ylabel("requests under way")
    other.set_ylim(0, ROOM_FOR_LEGEND * max(1, under_way.max()))
    handles = panel.get_legend_handles_labels()[0] + other.get_legend_handles_labels()[0]
    other.legend(handles=handles, loc="upper center", ncols=3, framealpha=1, fontsize="small")
