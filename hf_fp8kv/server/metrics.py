"""Metrics of the server: counts for Prometheus, and a line of the log."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..utils.terminal import format_size
from .engine import Engine


class Metrics(Collector):
    """Counts of a server and its engine; `registry` has the histograms of Latencies."""

    def __init__(self, engine: Engine, registry: CollectorRegistry) -> None:
        self._engine, self._registry = engine, registry
        # Finished requests to generate by HTTP status; 499 is a client that went away.
        self.statuses: Counter[int] = Counter()
        # For each request that is answered, how many of its answers are not finished.
        self.unfinished: Counter[object] = Counter()
        registry.register(self)

    def waiting(self) -> int:
        """Return the number of answers that have not had a step."""
        return max(sum(list(self.unfinished.values())) - self._engine.active(), 0)

    def format(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Return counters and gauges."""
        engine, used = self._engine, self._engine.usage()

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"hf_fp8kv_{name}", text, value)

        def counter(name: str, text: str, value: float) -> Metric:
            return CounterMetricFamily(f"hf_fp8kv_{name}", text, value)

        yield gauge("engine_up", "1 while the engine's thread runs", engine.is_alive())
        yield gauge("requests_active", "Requests that have had a step", engine.active())
        yield gauge("requests_waiting", "Requests that wait for a first step", self.waiting())
        yield counter("prompt_tokens", "Tokens of prompts", engine.prompt_tokens)
        yield counter("generated_tokens", "New tokens", engine.new_tokens)
        statuses = CounterMetricFamily(
            "hf_fp8kv_requests", "Requests to generate; 499: client gone", labels=["status"]
        )
        for status, count in sorted(self.statuses.items()):
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

    def summary(self, tokens_per_second: float) -> str:
        """Return what runs and what the pages hold, in one line."""
        engine, used = self._engine, self._engine.usage()
        parts = [
            f"requests: {engine.active()} active, {self.waiting()} waiting, "
            f"{self.statuses.total()} answered",
            f"{tokens_per_second:.1f} tokens/s",
        ]
        if used is not None:
            parts += [
                f"pages: {used.pages_used} of {used.pages_total} used, {used.tokens_held} tokens, "
                f"{format_size(used.bytes_used)} of {format_size(used.bytes_total)}",
                f"prefixes: {used.prefix_hits} hits, {used.prefix_tokens} tokens",
            ]
        return "; ".join(parts)
