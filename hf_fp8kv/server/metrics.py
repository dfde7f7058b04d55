"""Metrics of the server: counts and histograms for Prometheus, and a line for the log."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..utils.terminal import format_size
from .sampling import Sequence

# In seconds. A CPU may take minutes for the work of a second on a GPU.
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics(Collector):
    """Counts of a server and its `engine`. Histograms have `model` as their label."""

    engine: Any  # an Engine, set when it has started

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()

        def make(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            histogram = Histogram(
                f"hf_fp8kv_{name}_seconds", text, ["model_name"], buckets=buckets, registry=registry
            )
            return histogram.labels(model_name=model)

        self._queue = make("queue_time", "From a request to its first step", _LONG)
        self._first = make("time_to_first_token", "From a request to its first token", _LONG)
        self._next = make("inter_token_latency", "From one token of a request to the next", _SHORT)
        self._duration = make("request_duration", "From a request to its last token", _LONG)
        # Finished requests to generate, by HTTP status. 499 means that the client has left.
        self.statuses: Counter[int] = Counter()
        # The number of unfinished answers of each running request.
        self.unfinished: Counter[Any] = Counter()
        registry.register(self)

    def note_token(self, sequence: Sequence, began: float) -> None:
        """Record a new token of a request. `began` is the time at which its first step began."""
        now = time.perf_counter()
        if sequence.last_token_at is None:
            self._first.observe(now - sequence.submitted_at)
            self._queue.observe(max(began - sequence.submitted_at, 0.0))
        else:
            self._next.observe(now - sequence.last_token_at)
        sequence.last_token_at = now

    def note_end(self, sequence: Sequence) -> None:
        """Record the last token of a request."""
        self._duration.observe(time.perf_counter() - sequence.submitted_at)

    def waiting(self) -> int:
        """Return the number of answers that have not had a step."""
        active: int = self.engine.active()
        return max(sum(list(self.unfinished.values())) - active, 0)

    def format(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Return counters and gauges."""
        engine, used = self.engine, self.engine.usage()

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
            "hf_fp8kv_requests", "Requests to generate, 499 if the client left", labels=["status"]
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
        yield counter("prefix_hits", "Requests that found their beginning", used.prefix_hits)
        yield counter("prefix_tokens", "Tokens that were not computed again", used.prefix_tokens)
        yield counter("store_tokens", "Tokens read from the prefix store", used.store_tokens)
        yield counter("store_read_bytes", "Read from the prefix store", used.store_bytes_read)
        yield counter("store_written_bytes", "Written to this store", used.store_bytes_written)

    def summary(self, tokens_per_second: float) -> str:
        """Return the numbers of requests, and the usage of the pages, in one line."""
        engine, used = self.engine, self.engine.usage()
        text = (
            f"requests: {engine.active()} active, {self.waiting()} waiting, "
            f"{self.statuses.total()} answered; {tokens_per_second:.1f} tokens/s"
        )
        if used is None:
            return text
        return (
            f"{text}; pages: {used.pages_used} of {used.pages_total} used, {used.tokens_held} "
            f"tokens, {format_size(used.bytes_used)} of {format_size(used.bytes_total)}; "
            f"prefixes: {used.prefix_hits} hits, {used.prefix_tokens} tokens"
        )
