"""Metrics of the server: for Prometheus, and as a line of the log."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ...utils.terminal import format_size
from .engine import Engine
from .requests import RequestTracker


class Metrics(Collector):
    """What a server does now and has done since its start; asked for when somebody looks.

    `registry` has the histograms already, see latencies.py.
    """

    def __init__(
        self, engine: Engine, tracker: RequestTracker, registry: CollectorRegistry
    ) -> None:
        self._engine, self._tracker, self._registry = engine, tracker, registry
        registry.register(self)

    def format(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing: names are not checked when this is registered, before the engine runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return counters and gauges."""
        engine, tracker, used = self._engine, self._tracker, self._engine.usage()

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"hf_fp8kv_{name}", text, value)

        def counter(name: str, text: str, value: float) -> Metric:
            return CounterMetricFamily(f"hf_fp8kv_{name}", text, value)

        yield gauge("engine_up", "1 while the engine's thread runs", engine.is_alive())
        yield gauge("requests_active", "Requests that have had a step", engine.active())
        yield gauge("requests_waiting", "Requests that wait for a first step", engine.waiting())
        yield counter("prompt_tokens", "Tokens of prompts", tracker.prompt_tokens)
        yield counter("generated_tokens", "New tokens", tracker.new_tokens)
        statuses = CounterMetricFamily(
            "hf_fp8kv_requests", "Requests to generate; 499: client gone", labels=["status"]
        )
        for status, count in sorted(tracker.statuses.items()):
            statuses.add_metric([str(status)], count)
        yield statuses
        if used is None:
            return
        yield gauge("pages_total", "Pages", used.pages_total)
        yield gauge("pages_used", "Pages with tokens in them", used.pages_used)
        yield gauge("tokens_held", "Tokens of requests and of kept prefixes", used.tokens_held)
        yield gauge("bytes_total", "Bytes of all pages", used.bytes_total)
        yield gauge("bytes_used", "Bytes of the pages in use", used.bytes_used)
        yield counter("prefix_hits", "Requests that found a prefix", used.prefix_hits)
        yield counter("prefix_tokens", "Tokens that these did not compute", used.prefix_tokens)
        yield counter("store_tokens", "Tokens that came from the prefix store", used.store_tokens)
        yield counter("store_read_bytes", "Read from the prefix store", used.store_bytes_read)
        yield counter("store_written_bytes", "Written to it", used.store_bytes_written)


def format_summary(engine: Engine, tracker: RequestTracker, tokens_per_second: float) -> str:
    """Return what runs and what the pages hold, in one line."""
    used = engine.usage()
    parts = [
        f"requests: {engine.active()} active, {engine.waiting()} waiting, "
        f"{tracker.statuses.total()} answered",
        f"{tokens_per_second:.1f} tokens/s",
    ]
    if used is not None:
        parts += [
            f"pages: {used.pages_used} of {used.pages_total} used, {used.tokens_held} tokens, "
            f"{format_size(used.bytes_used)} of {format_size(used.bytes_total)}",
            f"prefixes: {used.prefix_hits} hits, {used.prefix_tokens} tokens",
        ]
    return "; ".join(parts)
