"""Metrics in Prometheus' text format.

Owns: the registry of one frontend, what is counted about requests, and the gauges made of what the stages announce.
Does not know: who scrapes it. It has its own registry, so two frontends in one process do not mix.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from busllm.errors import Unavailable
from busllm.messages.control import Announcement
from busllm.messages.to_frontend import Usage
from busllm.requests.generation import ChoiceDelta
from busllm.stages.frontend.histogram import LoopHistogram

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9_]+")


class FrontendMetrics:
    """What one frontend counts.

    Args:
        peers: gives the stages that are known now.
    """

    def __init__(self, peers: Callable[[], Iterable[Announcement]]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "busllm_http_requests", "Answered requests.", ("endpoint", "status"), registry=self._registry
        )
        self.in_flight = Gauge("busllm_http_requests_in_flight", "Open exchanges.", registry=self._registry)
        self._seconds = Histogram(
            "busllm_http_request_seconds",
            "From a request's head to the end of its answer.",
            ("endpoint",),
            buckets=_LATENCIES_S,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "busllm_time_to_first_token_seconds",
            "From the submission of a request to its first token.",
            buckets=_LATENCIES_S,
            registry=self._registry,
        )
        self.inter_token = LoopHistogram(
            "busllm_inter_token_seconds",
            "Between two tokens of one choice; tokens that came together share their gap.",
            _GAPS_S,
        )
        self._registry.register(self.inter_token)
        self.prompt_tokens = Counter("busllm_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self.cached_tokens = Counter("busllm_cached_tokens", "Prompt tokens found in cache.", registry=self._registry)
        self.completion_tokens = Counter("busllm_completion_tokens", "Generated tokens.", registry=self._registry)
        self._registry.register(_StageCollector(peers))

    def answered(self, endpoint: str, status: int | None, seconds: float) -> None:
        """Counts an exchange that ended; status None = the client left before there was one."""
        self._requests.labels(endpoint, "left" if status is None else str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def meter(self) -> GenerationMeter:
        """A meter for one submitted request."""
        return GenerationMeter(self)

    def count_usage(self, usage: Usage, *, first_of_prompt: bool) -> None:
        """Counts the tokens of a finished choice; a prompt counts once, however many choices it has."""
        if first_of_prompt:
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.cached_tokens.inc(usage.cached_tokens)
        self.completion_tokens.inc(usage.completion_tokens)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class GenerationMeter:
    """Times the tokens of one request."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._submitted_at = time.monotonic()
        self._last_at: dict[int, float] = {}

    def observe(self, deltas: Iterable[ChoiceDelta]) -> None:
        """Takes what arrived now."""
        now = time.monotonic()
        num_tokens: dict[int, int] = {}
        for delta in deltas:
            if delta.token_ids:
                num_tokens[delta.choice] = num_tokens.get(delta.choice, 0) + len(delta.token_ids)
        for choice, number in num_tokens.items():
            last_at = self._last_at.get(choice)
            if not self._last_at:
                self._metrics.first_token.observe(now - self._submitted_at)
            if last_at is not None:
                self._metrics.inter_token.observe((now - last_at) / number, number)
            self._last_at[choice] = now


class _StageCollector(Collector):
    """Turns announcements into gauges.

    A number becomes `busllm_<kind>_<name>{instance, part}`, `part` where a count has parts, and a text
    `busllm_<kind>_<name>_info{instance, value}`, which is 1.
    """

    def __init__(self, peers: Callable[[], Iterable[Announcement]]) -> None:
        self._peers = peers

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names depend on who is there."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything that the stages announced last."""
        families: dict[str, GaugeMetricFamily] = {}
        stages = GaugeMetricFamily("busllm_stage", "Known stages.", labels=("kind", "index", "instance", "state"))
        for peer in self._known_peers():
            stages.add_metric((peer.kind, str(peer.index), peer.instance, peer.state.value), 1.0)
            announced = {**peer.load, **peer.statistics}  # a name that is in both is one sample: two would be refused
            for name, part, value in _numbers(announced):
                metric = _NOT_IN_A_NAME.sub("_", f"busllm_{peer.kind}_{name}".lower())
                family = families.setdefault(
                    metric, GaugeMetricFamily(metric, f"{name}, as announced.", labels=("instance", "part"))
                )
                family.add_metric((peer.instance, part), value)
            for name, text in _texts(announced):
                metric = _NOT_IN_A_NAME.sub("_", f"busllm_{peer.kind}_{name}_info".lower())
                family = families.setdefault(
                    metric, GaugeMetricFamily(metric, f"{name}, as announced.", labels=("instance", "value"))
                )
                family.add_metric((peer.instance, text), 1.0)
        yield stages
        yield from families.values()

    def _known_peers(self) -> Iterable[Announcement]:
        try:
            return self._peers()
        except Unavailable:
            # Not on the bus yet, so nobody is known; what this frontend itself counts can be read all the same.
            return ()


def _numbers(source: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yields (name, part, number); a nested table's keys become parts."""
    for key, value in source.items():
        if isinstance(value, dict):
            for inner, part, number in _numbers(value):
                yield key, ".".join(word for word in (inner, part) if word), number
        elif isinstance(value, int | float):
            yield key, "", float(value)


def _texts(source: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of what is a text and not empty."""
    for key, value in source.items():
        if isinstance(value, str) and value:
            yield key, value
