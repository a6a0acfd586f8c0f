"""`GET /metrics`: the engine's counts as Prometheus text, read at the moment of the request."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_lite.entrypoints.served_engine import ServedEngine


class EngineCollector(Collector):
    """Turns the engine's counts into metrics; the engine itself knows nothing of Prometheus."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """One sample a metric."""
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": ("Requests that are being computed.", stats.num_running),
            "num_requests_waiting": ("Requests that wait for their turn.", stats.num_waiting),
            "num_free_kv_blocks": ("Blocks of the KV cache that no request owns.", stats.num_free_blocks),
            "num_total_kv_blocks": ("Blocks of the KV cache.", stats.num_total_blocks),
        }
        counters = {
            "num_preemptions": ("Requests that lost their KV blocks and were queued again.", stats.num_preemptions),
            "num_requests_aborted": ("Requests that ended before they were done.", stats.num_aborted),
        }
        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(f"vllm_lite:{name}", help_text, value=value)
        for name, (help_text, value) in counters.items():
            yield CounterMetricFamily(f"vllm_lite:{name}", help_text, value=value)


def make_registry(engine: ServedEngine) -> CollectorRegistry:
    """A registry of this server alone, so that two servers in a process do not mix."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry
