"""Usage of an engine's pages."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..formats import count_plans
from .fp8_manager import enabled_state


@dataclass(frozen=True)
class Usage:
    """The current contents of an engine, in this process if tensor parallelism is used.

    Attributes:
        pages_total: Planned pages, in the engine's blocks: `page_size` tokens of every layer.
        pages_used: Pages allocated to live requests and to prefixes kept for reuse.
        tokens_held: Tokens of live requests and of kept prefixes. Shared tokens count once.
        bytes_total: Bytes of `pages_total`.
        bytes_used: Bytes of `pages_used`.
        prefix_hits: Number of times that a request found its beginning in the cache, since the
            cache was made. A request that had to give up its pages may count again.
        prefix_tokens: Tokens that these requests did not have to compute.
        requests_active: Requests that hold pages.
        requests_waiting: Requests that wait for their first step.
        store_tokens: Tokens of prompts that came from a `PrefixStore`. 0 without one.
        store_bytes_read: Bytes read from its files.
        store_bytes_written: Bytes written to its files.
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


def usage(owner: Any) -> Usage | None:
    """Return the usage of an engine's pages, or None if no pages have been made yet.

    Args:
        owner: A manager, or an enabled model, whose last manager counts.
    """
    state = enabled_state(owner)
    if state is not None:
        managers = [m for m in state.managers if m.batch_processor is not None]
        owner = managers[-1] if managers else None
    processor = getattr(owner, "batch_processor", None)
    if processor is None:
        return None
    cache, scheduler = processor.cache, processor.scheduler
    active = list(scheduler.active_requests.values())
    lengths = {state.request_id: state.position_offset for state in active}
    total, used, page, tokens = cache.memory_usage(lengths)
    store = cache.chosen.store
    stored = Counter[str]({} if store is None else store.counts())  # of this process
    return Usage(
        pages_total=total // page,
        pages_used=-(-used // page),
        tokens_held=tokens,
        bytes_total=total,
        bytes_used=used,
        prefix_hits=cache.prefix_hits,
        prefix_tokens=cache.prefix_tokens,
        requests_active=len(active),
        requests_waiting=len(scheduler.waiting_requests) + owner.input_queue.qsize(),
        plans=count_plans({i: layer.plan for i, layer in cache.layers.items()}),
        store_tokens=stored["tokens_found"],
        store_bytes_read=stored["bytes_read"],
        store_bytes_written=stored["bytes_written"],
    )
