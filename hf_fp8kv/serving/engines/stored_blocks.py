"""Full blocks of an engine's pages in a `PrefixStore`: found before a prompt is computed, and left.

The engine keeps full blocks that nobody uses, under a hash of their tokens, until it needs the
room. What a store has of a prompt is put among them, where the engine then finds it.
"""

from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from ...cache.prefix_store import Page, PrefixStore, chain_keys

_NAME = "block"


class StoredBlocks:
    """The blocks of one allocator, and a store; `identity` says what else their bytes depend on."""

    def __init__(self, store: PrefixStore, identity: str, allocator: Any) -> None:
        self._store, self._allocator = store, allocator
        self._slots, self._rows = int(allocator.tokens_per_page), allocator._copy_view
        self._identity = f"{identity}.blocks.{self._rows.width}"

    def fetch(self, tokens: list[int]) -> None:
        """Put the beginning of a prompt that the store has among the blocks kept for reuse.

        As many blocks as are free are taken; at least one token is left to be computed.
        """
        allocator, slots = self._allocator, self._slots
        most = (len(tokens) - 1) // slots
        known = len(allocator.match_prefix_blocks(tokens))
        if known >= most:
            return
        keys = chain_keys(self._identity, torch.tensor(tokens), slots)
        rows: list[torch.Tensor] = []
        for key in keys[known:most]:
            page = self._store.read(key)
            if page is None:
                break
            rows.append(page.tensors[_NAME])
        blocks = self._take(len(rows))
        if not blocks:
            self._store.count(misses=int(not known))
            return
        index = torch.tensor(blocks, device=self._rows.device)
        self._rows.index_copy_(0, index, torch.stack(rows[: len(blocks)]).to(self._rows.device))
        last = None
        for place in range(known + len(blocks)):
            part = list(tokens[place * slots : (place + 1) * slots])
            last = cache_allocator.compute_block_hash(last, part)
            if place >= known:
                allocator.ledger.register_new_hash(blocks[place - known], last)
        # A block with a hash is kept, the last one to be given up first; one whose like there was
        # already, behind what had been given up, is free again.
        free = [block for block in reversed(blocks) if allocator.ledger.release(block)]
        allocator.pool.free_blocks(allocator.index, free)
        self._store.touch(keys[: known + len(blocks)])
        self._store.count(hits=1, tokens_found=len(blocks) * slots)

    def _take(self, count: int) -> list[int]:
        """Return up to `count` free blocks, which are not free any more."""
        pool, index = self._allocator.pool, self._allocator.index
        while pool.count_free_blocks(index) < count and pool.num_free_sectors:
            pool.allocate_sector(index)
        count = min(count, pool.count_free_blocks(index))
        return list(pool.get_free_blocks(index, count)) if count else []

    def keep(self, request_id: str, tokens: list[int]) -> None:
        """Store the full blocks of a request that the store does not have."""
        table = list(self._allocator.block_table.get(request_id, ()))
        hashes = self._allocator.ledger.block_to_hash
        full = next((at for at, block in enumerate(table) if block not in hashes), len(table))
        if full:
            keys = chain_keys(
                self._identity, torch.tensor(tokens[: full * self._slots]), self._slots
            )
            self._store.write(keys, lambda places: self._copy([table[at] for at in places]))

    def _copy(self, blocks: list[int]) -> list[Page]:
        if not blocks:
            return []
        index = torch.tensor(blocks, device=self._rows.device)
        rows = self._rows.index_select(0, index).cpu()
        return [Page({_NAME: row.clone()}, {}) for row in rows]
