"""`GET /metrics`: the engine's counts as Prometheus text, read at the moment of the request.

Names are vLLM's but for the prefix, and so is the label `model_name`, by which its dashboards choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vllm_lite.engine.statistics import BOUNDS_S, EngineStats, TimeCounts
from vllm_lite.entrypoints.served_engine import ServedEngine

PREFIX = "vllm_lite:"
Value = TypeVar("Value")
Samples: TypeAlias = list[tuple[Mapping[str, str], Value]]
"""Each with the label, if any, that it has beside the model's name. At least one, all with the same label."""


class EngineCollector(Collector):
    """Turns the engine's counts, and those of refused requests, into metrics; the engine knows nothing of these."""

    def __init__(self, engine: ServedEngine, model_name: str, refusals: Mapping[int, int]) -> None:
        self._engine = engine
        self._refusals = refusals
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """One sample a metric, or one for each value of its label."""
        stats = self._engine.stats()
        for name, (help_text, value) in _gauges(stats).items():
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (help_text, counts) in _counters(stats, self._refusals).items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=self._label_names(counts))
            for label, count in counts:
                counter.add_metric([self._model_name, *label.values()], count)
            yield counter
        for name, (help_text, times) in _histograms(stats).items():
            histogram = HistogramMetricFamily(PREFIX + name, help_text, labels=self._label_names(times))
            for label, one in times:
                histogram.add_metric([self._model_name, *label.values()], _buckets(one), one.sum_s)
            yield histogram

    def _label_names(self, samples: Samples[Any]) -> list[str]:
        return ["model_name", *samples[0][0]]


def make_registry(engine: ServedEngine, model_name: str, refusals: Mapping[int, int]) -> CollectorRegistry:
    """A registry of this server alone, so that two servers in a process do not mix. `refusals` are counts by status."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name, refusals))
    return registry


def _gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    return {
        "num_requests_running": ("Requests that are being computed.", stats.num_running),
        "num_requests_waiting": ("Requests that wait for their turn.", stats.num_waiting),
        "num_free_kv_blocks": ("Blocks of the KV cache that no request owns.", stats.num_free_blocks),
        "num_total_kv_blocks": ("Blocks of the KV cache.", stats.num_total_blocks),
        "kv_cache_usage_perc": ("Share of the KV blocks that requests own; 1 is all.", stats.kv_cache_usage),
    }


def _counters(stats: EngineStats, refusals: Mapping[int, int]) -> dict[str, tuple[str, Samples[int]]]:
    """Prometheus adds `_total` to their names."""
    finished: Samples[int] = [({"finished_reason": reason}, count) for reason, count in stats.num_finished.items()]
    refused: Samples[int] = [({"status": str(status)}, count) for status, count in refusals.items()]
    counts = {
        "num_preemptions": ("Requests that lost their KV blocks and were queued again.", stats.num_preemptions),
        "num_requests_accepted": ("Requests that were queued; refused ones are not.", stats.num_accepted),
        "num_requests_aborted": ("Accepted requests that were ended before they were done.", stats.num_aborted),
        "num_requests_failed": ("Accepted requests that failed in a step.", stats.num_failed),
        "prompt_tokens": ("Tokens of the prompts that have been computed.", stats.num_prompt_tokens),
        "generation_tokens": ("Generated tokens, of all candidates and beams.", stats.num_generated_tokens),
        "prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.num_prefix_queried_tokens),
        "prefix_cache_hits": ("Tokens found in the prefix cache.", stats.num_prefix_hit_tokens),
    }
    return {
        "request_success": ('Finished requests: "length" where a candidate was cut off, else "stop".', finished),
        "num_requests_refused": ("Requests that were not queued, by the status of their answer.", refused),
        **{name: (help_text, [({}, count)]) for name, (help_text, count) in counts.items()},
    }


def _histograms(stats: EngineStats) -> dict[str, tuple[str, Samples[TimeCounts]]]:
    phases: Samples[TimeCounts] = [({"phase": phase}, times) for phase, times in stats.step_times.items()]
    return {
        "request_queue_time_seconds": ("From being queued to being admitted first.", [({}, stats.queue_times)]),
        "time_to_first_token_seconds": ("From arrival to the first token.", [({}, stats.first_token_times)]),
        "inter_token_latency_seconds": ("Between steps that bring a request tokens.", [({}, stats.inter_token_times)]),
        "e2e_request_latency_seconds": ("Finished requests, from arrival to end.", [({}, stats.end_to_end_times)]),
        "step_time_seconds": ("The phases of each step.", phases),
    }


def _buckets(times: TimeCounts) -> list[tuple[str, float]]:
    """Prometheus wants each bucket with all below it."""
    return list(zip([*map(floatToGoString, BOUNDS_S), "+Inf"], accumulate(times.counts)))
