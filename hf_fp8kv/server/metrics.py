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

# Buckets of the histograms, in seconds. A CPU may take minutes where a GPU takes a second.
_LONG_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
# The description and the buckets of each histogram.
_HISTOGRAMS = {
    "queue_time": ("From a request to an answer's first step", _LONG_SECONDS),
    "time_to_first_token": ("From a request to an answer's first token", _LONG_SECONDS),
    "inter_token_latency": ("From a token to the next token", _SHORT_SECONDS),
    "request_duration": ("From a request to an answer's last token", _LONG_SECONDS),
}


class Metrics(Collector):
    """Metrics of a server and its engine. `model_name` is the label of the histograms."""

    engine: Any  # the Engine, set after it has started

    def __init__(self, model_name: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._histograms: dict[str, Any] = {}
        for name, (description, buckets) in _HISTOGRAMS.items():
            histogram = Histogram(
                f"hf_fp8kv_{name}_seconds",
                description,
                ["model_name"],
                buckets=buckets,
                registry=registry,
            )
            self._histograms[name] = histogram.labels(model_name=model_name)
        # Number of finished requests to generate, by HTTP status. 499 means that the client left.
        self.status_counts: Counter[int] = Counter()
        # Number of unfinished answers of each RunningRequest.
        self.unfinished_answers: Counter[Any] = Counter()
        registry.register(self)

    def record_token(self, sequence: Sequence, first_step_at: float) -> None:
        """Record a new token of an answer. The answer's first step began at `first_step_at`."""
        now = time.perf_counter()
        if sequence.last_token_at is None:
            self._histograms["time_to_first_token"].observe(now - sequence.submitted_at)
            queue_seconds = max(first_step_at - sequence.submitted_at, 0.0)
            self._histograms["queue_time"].observe(queue_seconds)
        else:
            self._histograms["inter_token_latency"].observe(now - sequence.last_token_at)
        sequence.last_token_at = now

    def record_end(self, sequence: Sequence) -> None:
        """Record the end of an answer, after its last token."""
        self._histograms["request_duration"].observe(time.perf_counter() - sequence.submitted_at)

    def count_waiting(self) -> int:
        """Return the number of the engine's requests that wait for a first step."""
        num_active: int = self.engine.count_active()
        return max(sum(list(self.unfinished_answers.values())) - num_active, 0)

    def format_prometheus(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine = self.engine
        usage = engine.read_usage()
        gauge = GaugeMetricFamily
        counter = CounterMetricFamily
        num_waiting = self.count_waiting()
        rows: list[tuple[Any, str, str, float]] = [
            (gauge, "engine_up", "1 while the engine's thread runs", engine.is_alive()),
            (gauge, "requests_active", "Requests after their first step", engine.count_active()),
            (gauge, "requests_waiting", "Requests that wait for a first step", num_waiting),
            (counter, "prompt_tokens", "Tokens of prompts", engine.num_prompt_tokens),
            (counter, "generated_tokens", "New tokens", engine.num_new_tokens),
        ]
        if usage is not None:
            rows += [
                (gauge, "pages_total", "Pages", usage.pages_total),
                (gauge, "pages_used", "Pages with tokens in them", usage.pages_used),
                (gauge, "tokens_held", "Tokens of requests and kept prefixes", usage.tokens_held),
                (gauge, "bytes_total", "Bytes of all pages", usage.bytes_total),
                (gauge, "bytes_used", "Bytes of the pages in use", usage.bytes_used),
                (counter, "prefix_hits", "Requests with cached first tokens", usage.prefix_hits),
                (counter, "prefix_tokens", "Tokens not computed again", usage.prefix_tokens),
                (counter, "store_tokens", "Tokens read from the prefix store", usage.store_tokens),
                (
                    counter,
                    "store_read_bytes",
                    "Bytes read from the prefix store",
                    usage.store_bytes_read,
                ),
                (
                    counter,
                    "store_written_bytes",
                    "Bytes written to the store",
                    usage.store_bytes_written,
                ),
            ]
        for family, name, description, value in rows:
            yield family(f"hf_fp8kv_{name}", description, value)
        statuses = CounterMetricFamily(
            "hf_fp8kv_requests", "Requests to generate, 499 if the client left", labels=["status"]
        )
        for status, count in sorted(self.status_counts.items()):
            statuses.add_metric([str(status)], count)
        yield statuses

    def summarize(self, tokens_per_second: float) -> str:
        """Return one line for the log: numbers of answers and requests, and the usage of pages."""
        engine = self.engine
        usage = engine.read_usage()
        summary = (
            f"requests: {engine.count_active()} active, {self.count_waiting()} waiting, "
            f"{self.status_counts.total()} finished; {tokens_per_second:.1f} tokens/s"
        )
        if usage is None:
            return summary
        return (
            f"{summary}; pages: {usage.pages_used} of {usage.pages_total} used, "
            f"{usage.tokens_held} tokens, "
            f"{format_size(usage.bytes_used)} of {format_size(usage.bytes_total)}; "
            f"prefixes: {usage.prefix_hits} hits, {usage.prefix_tokens} tokens"
        )
