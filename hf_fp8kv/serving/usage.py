"""Statistics of an engine: the pages in use, the requests, and the reused prefixes."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..formats import count_plans
from .fp8_manager import find_factory


@dataclass(frozen=True)
class Usage:
    """The contents and the statistics of an engine. With tensor parallelism, of this rank only.

    Attributes:
        pages_total: Pages planned by the engine, each with `page_size` tokens of every layer.
        pages_used: Pages allocated to live requests and to prefixes kept for reuse.
        tokens_held: Tokens of live requests and of kept prefixes. Shared tokens count once.
        bytes_total: Size of the `pages_total` pages, in bytes.
        bytes_used: Size of the `pages_used` pages, in bytes.
        prefix_hits: Number of times that a request found its beginning in the cache, since the
            cache was made. A request whose pages were evicted may count again.
        prefix_tokens: Number of prompt tokens that were found and not computed again.
        requests_active: Requests that hold pages.
        requests_waiting: Requests that wait for their first step.
        store_tokens: Prompt tokens read from a `PrefixStore`. 0 without a store.
        store_bytes_read: Bytes read from the store's files.
        store_bytes_written: Bytes written to the store's files.
        plans: Number of layers with each storage plan, such as {"K fp8_e3m4, V fp8_e3m4": 30}.
    """

    pages_total: int
    pages_used: int
    tokens_held: int
    bytes_total: int
    bytes_used: int
    prefix_hits: int
    prefix_tokens: int
    requests_active: int
    requests_waiting: int
    plans: dict[str, int]
    store_tokens: int
    store_bytes_read: int
    store_bytes_written: int


def read_usage(owner: Any) -> Usage | None:
    """Return the usage of an engine's pages, or None if no pages are allocated yet.

    Args:
        owner: A manager, or an enabled model, whose newest manager is used.
    """
    factory = find_factory(owner)
    managers = [owner] if factory is None else factory.managers
    # A manager that has not started yet has no pages.
    started_managers = [
        manager for manager in managers if getattr(manager, "batch_processor", None) is not None
    ]
    manager: Any = started_managers[-1] if started_managers else None
    processor = getattr(manager, "batch_processor", None)
    if processor is None:
        return None
    cache = processor.cache
    scheduler = processor.scheduler
    active_requests = list(scheduler.active_requests.values())
    stored_lengths = {state.request_id: state.position_offset for state in active_requests}
    bytes_total, bytes_used, page_bytes, num_tokens = cache.measure_memory(stored_lengths)
    store = cache.serving_config.prefix_store
    # The counts of this process. Without a store, each count is 0.
    store_counts = Counter[str]({} if store is None else store.counts())
    return Usage(
        pages_total=bytes_total // page_bytes,
        pages_used=math.ceil(bytes_used / page_bytes),
        tokens_held=num_tokens,
        bytes_total=bytes_total,
        bytes_used=bytes_used,
        prefix_hits=cache.prefix_hits,
        prefix_tokens=cache.prefix_tokens,
        requests_active=len(active_requests),
        requests_waiting=len(scheduler.waiting_requests) + manager.input_queue.qsize(),
        plans=count_plans({index: layer.plan for index, layer in cache.layers.items()}),
        store_tokens=store_counts["tokens_found"],
        store_bytes_read=store_counts["bytes_read"],
        store_bytes_written=store_counts["bytes_written"],
    )
