"""Metrics of a memory in Prometheus' text form, gathered when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from memkv.memory.metrics import Metric

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def exposition(metrics: Iterable[Metric]) -> bytes:
    """What a Prometheus server reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(list(metrics)))
    return generate_latest(registry)


class _Given(Collector):
    """Metrics that were gathered before."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for metric in self._metrics:
            family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            shown = family(metric.name, metric.help, labels=[metric.label] if metric.label else [])
            for label, value in metric.samples.items():
                shown.add_metric([label] if metric.label else [], value)
            yield shown
