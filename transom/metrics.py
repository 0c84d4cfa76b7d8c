"""Figures of a process for Prometheus: one registry per process, never the library's global one.

Every process. A stage's load becomes gauges and counters here; whatever else it counts it hands over as
collectors. Labels are fixed words only: never an id, a URL or a client's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from transom import __version__

CONTENT_TYPE = CONTENT_TYPE_LATEST
# From one decode step on a GPU to a long video on a CPU.
SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Collector(Protocol):
    """Anything that a registry can ask for its metrics; the library's own metrics are such."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with their present values."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The metric of a figure that stands beside others of its kind: one name, told apart by labels."""

    name: str
    labels: dict[str, str]


class LoadCollector:
    """Turns the figures of `Stage.load` into metrics; those named in `totals` only ever grow."""

    def __init__(
        self,
        stage: str,
        load: Callable[[], Mapping[str, float]],
        totals: Iterable[str],
        labelled: Mapping[str, Labelled] | None = None,
    ) -> None:
        self._prefix = f"transom_{stage}"
        self._load = load
        self._totals = frozenset(totals)
        self._labelled = labelled or {}

    def collect(self) -> Iterator[Metric]:
        """Yield one metric per figure, or per name that several share."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for key, value in self._load().items():
            assert _NAME.fullmatch(key), key
            metric = self._labelled.get(key) or Labelled(key, {})
            family = families.get(metric.name)
            if family is None:
                family = families[metric.name] = self._family(key, metric)
            family.add_metric(list(metric.labels.values()), value)
        yield from families.values()

    def _family(self, key: str, metric: Labelled) -> GaugeMetricFamily | CounterMetricFamily:
        name, text = f"{self._prefix}_{metric.name}", metric.name.replace("_", " ")
        labels = list(metric.labels)
        if key in self._totals:
            return CounterMetricFamily(name, f"Count of {text} since the process started.", labels=labels)
        return GaugeMetricFamily(name, f"Present {text}.", labels=labels)


class StateCollector:
    """Says which process this is and whether it can take work."""

    def __init__(self, stage: str, is_ready: Callable[[], bool]) -> None:
        self._stage = stage
        self._is_ready = is_ready

    def collect(self) -> Iterator[Metric]:
        """Yield readiness and version."""
        ready = GaugeMetricFamily("transom_ready", "1 when the process can take work.", labels=["stage"])
        ready.add_metric([self._stage], float(self._is_ready()))
        yield ready
        build = GaugeMetricFamily("transom_build_info", "Always 1.", labels=["stage", "version"])
        build.add_metric([self._stage, __version__], 1.0)
        yield build


def make_registry(collectors: Iterable[Collector]) -> CollectorRegistry:
    """Return the process's registry: CPU, memory and descriptors of the process beside `collectors`.

    Nothing is asked for a value yet: a stage that is starting has none.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # series that nothing reads
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    return registry


def expose(registry: CollectorRegistry) -> bytes:
    """Return the registry in Prometheus's text format."""
    return generate_latest(registry)
