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

# Buckets of long and short times, in seconds. A CPU may take minutes where a GPU takes a second.
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics(Collector):
    """Metrics of a server and its `engine`. `model` is the label of the histograms."""

    engine: Any  # the Engine, set after it has started

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()

        def make(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            histogram = Histogram(
                f"hf_fp8kv_{name}_seconds", text, ["model_name"], buckets=buckets, registry=registry
            )
            return histogram.labels(model_name=model)

        self._queue_time = make("queue_time", "From a request to its first step", _LONG)
        self._first_token = make("time_to_first_token", "From a request to its first token", _LONG)
        self._next_token = make("inter_token_latency", "From a token to the next token", _SHORT)
        self._duration = make("request_duration", "From a request to its last token", _LONG)
        # Number of finished requests to generate, by HTTP status. 499 means that the client left.
        self.status_counts: Counter[int] = Counter()
        # The number of unfinished answers of each running request.
        self.unfinished_answers: Counter[Any] = Counter()
        registry.register(self)

    def record_token(self, sequence: Sequence, started_at: float) -> None:
        """Record a new token of a request, whose first step began at `started_at`."""
        now = time.perf_counter()
        if sequence.last_token_at is None:
            self._first_token.observe(now - sequence.submitted_at)
            self._queue_time.observe(max(started_at - sequence.submitted_at, 0.0))
        else:
            self._next_token.observe(now - sequence.last_token_at)
        sequence.last_token_at = now

    def record_end(self, sequence: Sequence) -> None:
        """Record the last token of a request."""
        self._duration.observe(time.perf_counter() - sequence.submitted_at)

    def count_waiting(self) -> int:
        """Return the number of answers that have not had a step yet."""
        active: int = self.engine.count_active()
        return max(sum(list(self.unfinished_answers.values())) - active, 0)

    def format(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield counters and gauges."""
        engine, usage = self.engine, self.engine.usage()

        def gauge(name: str, description: str, value: float) -> Metric:
            return GaugeMetricFamily(f"hf_fp8kv_{name}", description, value)

        def counter(name: str, description: str, value: float) -> Metric:
            return CounterMetricFamily(f"hf_fp8kv_{name}", description, value)

        yield gauge("engine_up", "1 while the engine's thread runs", engine.is_alive())
        yield gauge("requests_active", "Requests that have had a step", engine.count_active())
        yield gauge("requests_waiting", "Requests that wait for a first step", self.count_waiting())
        yield counter("prompt_tokens", "Tokens of prompts", engine.prompt_tokens)
        yield counter("generated_tokens", "New tokens", engine.new_tokens)
        statuses = CounterMetricFamily(
            "hf_fp8kv_requests", "Requests to generate, 499 if the client left", labels=["status"]
        )
        for status, count in sorted(self.status_counts.items()):
            statuses.add_metric([str(status)], count)
        yield statuses
        if usage is None:
            return
        yield gauge("pages_total", "Pages", usage.pages_total)
        yield gauge("pages_used", "Pages with tokens in them", usage.pages_used)
        yield gauge("tokens_held", "Tokens of requests and of kept prefixes", usage.tokens_held)
        yield gauge("bytes_total", "Bytes of all pages", usage.bytes_total)
        yield gauge("bytes_used", "Bytes of the pages in use", usage.bytes_used)
        yield counter("prefix_hits", "Requests that found their beginning", usage.prefix_hits)
        yield counter("prefix_tokens", "Tokens that were not computed again", usage.prefix_tokens)
        yield counter("store_tokens", "Tokens read from the prefix store", usage.store_tokens)
        yield counter("store_read_bytes", "Read from the prefix store", usage.store_bytes_read)
        yield counter("store_written_bytes", "Written to this store", usage.store_bytes_written)

    def summarize(self, tokens_per_second: float) -> str:
        """Return one line with the numbers of requests and the usage of the pages."""
        engine, usage = self.engine, self.engine.usage()
        text = (
            f"requests: {engine.count_active()} active, {self.count_waiting()} waiting, "
            f"{self.status_counts.total()} answered; {tokens_per_second:.1f} tokens/s"
        )
        if usage is None:
            return text
        return (
            f"{text}; pages: {usage.pages_used} of {usage.pages_total} used, {usage.tokens_held} "
            f"tokens, {format_size(usage.bytes_used)} of {format_size(usage.bytes_total)}; "
            f"prefixes: {usage.prefix_hits} hits, {usage.prefix_tokens} tokens"
        )
