"""Prometheus metrics: read from the engine when they are asked for, so that they cannot disagree with it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvcq.runtime.hf.api.about import About
from kvcq.runtime.hf.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Meters(Collector):
    """Everything that ``/metrics`` tells."""

    def __init__(self, engine: Engine, about: About) -> None:
        self._engine, self._about = engine, about
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.first_token = Histogram(
            "kvcq_first_token_seconds",
            "Time from a request's arrival to the first part of its answer",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.duration = Histogram(
            "kvcq_request_seconds",
            "Time from a request's arrival to the end of its answer",
            buckets=SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all of them in the text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine counts."""
        engine, about = self._engine, self._about
        yield InfoMetricFamily(
            "kvcq_bundle",
            "The bundle that the cache is coded with",
            {"digest": about.digest, "model": about.name, "engine": "hf"},
        )
        gauges = {
            "kvcq_bytes_per_token": ("Bytes that one more token adds to the cache", about.bytes_per_token),
            "kvcq_capacity_tokens": ("Tokens that all running requests together may hold", about.capacity),
            "kvcq_reserved_tokens": ("Tokens reserved by running requests", engine.reserved_tokens),
            "kvcq_cache_bytes": (
                "Bytes that running requests have allocated",
                engine.cache_bytes(),
            ),
            "kvcq_canary_statistic": ("Canary statistic at the start, active from 0.7", about.statistic),
            "kvcq_requests_running": ("Requests that take turns", engine.running),
            "kvcq_requests_waiting": ("Requests that wait to be admitted", engine.waiting),
        }
        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(name, help_text, value)
        counts = engine.counts
        totals = {
            "kvcq_prompt_tokens": ("Prompt tokens computed", counts.prefilled),
            "kvcq_generated_tokens": ("Tokens generated", counts.generated),
            "kvcq_clamped_values": ("Values beyond the float16 range that were clamped", counts.clamped),
        }
        for name, (help_text, value) in totals.items():
            yield CounterMetricFamily(name, help_text, value)
        for name, label, help_text, by in (
            ("kvcq_requests", "reason", "Finished answers", counts.done),
            ("kvcq_errors", "kind", "Requests without a complete answer", counts.failed),
        ):
            family = CounterMetricFamily(name, help_text, labels=[label])
            for key, value in sorted(by.copy().items()):
                family.add_metric([key], value)
            yield family
