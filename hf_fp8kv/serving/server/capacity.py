"""How many tokens one request may hold, by itself, in an engine's pages and in its model.

A request that outgrows all pages stops the whole engine: it has to be known before it is let in.
"""

from collections.abc import Callable
from typing import Any

from ...errors import ConfigError

__all__ = ["model_tokens", "page_tokens"]


def page_tokens(cache: Any) -> int:
    """Returns the tokens that fit into the pages of an engine's empty cache; 0: not even one.

    Raises:
        ConfigError: this transformers builds its engine in another way.
    """
    if hasattr(cache, "cache_allocators"):  # transformers 5.23

        def fits(tokens: int) -> bool:
            wanted = (
                allocator.needs_new_sectors("", 0, tokens)
                for allocator in cache.cache_allocators.values()
            )
            return bool(sum(wanted) <= cache.num_sectors)

        most = cache.max_tokens_read
    elif hasattr(cache, "blocks_needed"):  # transformers 5.17

        def fits(tokens: int) -> bool:
            return bool(cache.blocks_needed(-(-tokens // cache.block_size), 0) <= cache.num_blocks)

        most = cache.num_blocks * cache.block_size
    else:
        raise ConfigError(
            "expected an engine's cache with cache_allocators or blocks_needed; this transformers "
            "has another. Tested with transformers 5.17 and 5.23: install one of them"
        )
    return _largest(fits, most)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number from 0 to `most` that fits."""
    low, high = 0, int(most)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def model_tokens(model: Any) -> int | None:
    """Returns the tokens that the model was made for; None where its config does not say."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
