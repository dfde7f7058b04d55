"""How long requests wait, and for what: histograms for Prometheus."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from .sampling import Sequence

# Seconds. A CPU needs minutes where a GPU needs a second.
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Latencies:
    """Histograms of a server's requests, each with the model's name as its label."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        def make(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            histogram = Histogram(
                f"hf_fp8kv_{name}_seconds", text, ["model_name"], buckets=buckets, registry=registry
            )
            return histogram.labels(model_name=model)

        self._queue = make("queue_time", "From a request to its first step", _LONG)
        self._first = make("time_to_first_token", "From a request to its first token", _LONG)
        self._next = make("inter_token_latency", "From one token of a request to the next", _SHORT)
        self._whole = make("request_duration", "From a request to its last token", _LONG)

    def note_token(self, sequence: Sequence, began: float) -> None:
        """Note that a request has one more token; `began` is when its first step began."""
        now = time.perf_counter()
        if sequence.last_token_at is None:
            self._first.observe(now - sequence.submitted_at)
            self._queue.observe(max(began - sequence.submitted_at, 0.0))
        else:
            self._next.observe(now - sequence.last_token_at)
        sequence.last_token_at = now

    def note_end(self, sequence: Sequence) -> None:
        """Note that a request has all its tokens."""
        self._whole.observe(time.perf_counter() - sequence.submitted_at)
