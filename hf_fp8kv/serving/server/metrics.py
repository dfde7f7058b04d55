"""Metrics of the server: for Prometheus, and as a line of the log."""

from ...utils.terminal import format_size
from .engine import Engine
from .requests import RequestTracker


def format_metrics(engine: Engine, tracker: RequestTracker) -> str:
    """Return all metrics in Prometheus' text format."""
    used = engine.usage()
    rows: list[tuple[str, str, str, float]] = [
        ("engine_up", "gauge", "1 while the engine's thread runs", engine.is_alive()),
        ("requests_active", "gauge", "Requests that have had a step", engine.active()),
        ("requests_waiting", "gauge", "Requests that wait for their first step", engine.waiting()),
        ("prompt_tokens_total", "counter", "Tokens of prompts", tracker.prompt_tokens),
        ("generated_tokens_total", "counter", "New tokens", tracker.new_tokens),
    ]  # fmt: skip
    if used is not None:
        rows += [
            ("pages_total", "gauge", "Pages", used.pages_total),
            ("pages_used", "gauge", "Pages with tokens in them", used.pages_used),
            ("tokens_held", "gauge", "Tokens of requests and of kept prefixes", used.tokens_held),
            ("bytes_total", "gauge", "Bytes of all pages", used.bytes_total),
            ("bytes_used", "gauge", "Bytes of the pages in use", used.bytes_used),
            ("prefix_hits_total", "counter", "Requests that found a prefix", used.prefix_hits),
            ("prefix_tokens_total", "counter", "Tokens that such requests did not compute",
             used.prefix_tokens),
        ]  # fmt: skip
    lines = []
    for name, kind, help, value in rows:
        lines += [f"# HELP hf_fp8kv_{name} {help}.", f"# TYPE hf_fp8kv_{name} {kind}"]
        lines.append(f"hf_fp8kv_{name} {int(value)}")
    lines += [
        "# HELP hf_fp8kv_requests_total Requests to generate, by HTTP status; 499: client gone.",
        "# TYPE hf_fp8kv_requests_total counter",
    ]
    for status, count in sorted(tracker.statuses.items()):
        lines.append(f'hf_fp8kv_requests_total{{status="{status}"}} {count}')
    return "\n".join(lines) + "\n"


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
