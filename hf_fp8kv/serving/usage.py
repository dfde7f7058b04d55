"""Usage of an engine's pages."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from ..formats import count_plans
from .fp8_manager import enabled_state


@dataclass(frozen=True)
class Usage:
    """What an engine holds at the moment; of this process, under tensor parallel.

    Attributes:
        pages_total: what the engine has planned, in its blocks: `page_size` tokens of every layer.
        pages_used: pages that are taken, by live requests and by prefixes kept for reuse.
        tokens_held: tokens of live requests and of prefixes kept; what several share counts once.
        bytes_total: of `pages_total`.
        bytes_used: of `pages_used`.
        prefix_hits: how often a request found its beginning in the cache, since the cache was
            made; one that had to give up its pages may find it again.
        prefix_tokens: tokens that these did not have to compute.
        requests_active: requests that hold pages.
        requests_waiting: requests that wait for their first step.
        store_tokens: tokens of prompts that came from a `PrefixStore`; 0 without one.
        store_bytes_read: of its files.
        store_bytes_written: of its files.
        plans: how many layers are stored how, such as {"K fp8_e3m4, V fp8_e3m4": 30}.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for JSON."""
        return asdict(self)


def usage(of: Any) -> Usage | None:
    """Return how full the pages are; None where no pages have been made yet.

    Args:
        of: a model that was enabled (the last of its managers counts), or a manager.
    """
    state = enabled_state(of)
    if state is not None:
        managers = [m for m in state.managers if m.batch_processor is not None]
        of = managers[-1] if managers else None
    processor = getattr(of, "batch_processor", None)
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
        requests_waiting=len(scheduler.waiting_requests) + of.input_queue.qsize(),
        plans=count_plans({i: layer.plan for i, layer in enumerate(cache.storage)}),
        store_tokens=stored["tokens_found"],
        store_bytes_read=stored["bytes_read"],
        store_bytes_written=stored["bytes_written"],
    )
