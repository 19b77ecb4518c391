"""A histogram that is fed with every token.

Owns: counting into buckets, and their form for Prometheus.
Does not know: what is counted (`metrics.py`).

`prometheus_client.Histogram` takes locks and walks its buckets one by one, which costs as much as writing the token's
event. This one belongs to one event loop, so it needs no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class LoopHistogram(Collector):
    """A histogram without labels.

    Args:
        name, documentation: as exposed.
        bounds: of the buckets, inclusive, rising; one without a bound is added.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, once or several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        """The buckets, each with all below it."""
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)
