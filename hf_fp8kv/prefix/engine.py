"""Full blocks of an engine's pages in a `PrefixStore`: found before a prompt is computed, and left.

The engine keeps full blocks that nobody uses, under a hash of their tokens, until it needs the
room. What a store has of a prompt is put among them, where the engine then finds it.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from .file import Page, chain_keys
from .store import PrefixStore


class StoredBlocks:
    """The blocks of one allocator, and a store; `identity` says what else their bytes depend on.

    The engine's thread alone uses it.
    """

    def __init__(self, store: PrefixStore, identity: str, allocator: Any) -> None:
        self._store, self._allocator = store, allocator
        self._slots, self._rows = int(allocator.tokens_per_page), allocator._copy_view
        self._pool, self._index = allocator.pool, allocator.index
        self._identity = f"{identity}.blocks.{self._rows.shape[1]}"
        # Of each block that was full once: the engine's hash of it and the key in the store, which
        # hold for as long as the engine has that hash for the block.
        self._keys: dict[int, tuple[int, str]] = {}
        self._missed: set[str] = set()  # requests; a waiting one asks at each step

    def fetch(self, request_id: str, tokens: list[int]) -> None:
        """Put the beginning of a prompt that the store has among the blocks kept for reuse.

        As many blocks as are free are taken; at least one token is left to be computed.
        """
        allocator, slots = self._allocator, self._slots
        most, known = (len(tokens) - 1) // slots, len(allocator.match_prefix_blocks(tokens))
        blocks: list[int] = []
        asked: list[tuple[int, str]] = []

        def wanted() -> Iterator[str]:
            key, name = "", None
            for place in range(most if known < most else 0):
                part = tokens[place * slots : (place + 1) * slots]
                (key,) = chain_keys(self._identity, part, slots, key)
                name = cache_allocator.compute_block_hash(name, part)
                if name not in allocator.ledger.hash_to_block:
                    asked.append((name, key))
                    yield key
                # else still cached, although a block before it was evicted

        if self._has_room():
            for page in self._store.read(wanted(), self._check):
                if not blocks:
                    synchronize(
                        self._rows.device
                    )  # a step that runs may still write to what is free
                name, key = asked[len(blocks)]
                blocks.append(self._put(page))
                allocator.ledger.register_new_hash(blocks[-1], name)
                self._keys[blocks[-1]] = name, key
                if not self._has_room():
                    break
        if asked and not known and not blocks and request_id not in self._missed:
            self._missed.add(request_id)
            self._store.count(misses=1)
        if blocks:
            synchronize(self._rows.device)  # the engine computes on another stream
            # A block with a hash is kept for reuse, the last one to be given up first.
            for block in reversed(blocks):
                allocator.ledger.release(block)
            self._store.count(hits=1, tokens_found=len(blocks) * slots)

    def _check(self, page: Page) -> None:
        if page.facts is not None or [*map(len, page.rows)] != [self._rows.shape[1]]:
            raise ValueError("not a block of this engine")

    def _has_room(self) -> bool:
        return bool(self._pool.count_free_blocks(self._index) or self._pool.num_free_sectors)

    def _put(self, page: Page) -> int:
        """Copy a page to a free block, which is not free any more, and return that."""
        if not self._pool.count_free_blocks(self._index):
            self._pool.allocate_sector(self._index)
        (block,) = self._pool.get_free_blocks(self._index, 1)
        self._rows[block].copy_(page.rows[0])
        return int(block)

    def keep(self, request_id: str, tokens: list[int], *, is_over: bool = False) -> None:
        """Store the blocks of a request that are full since the last time.

        At its end, before the engine gives the blocks up: also note that they were used, and store
        those that are gone from there.
        """
        slots, names = self._slots, self._allocator.ledger.block_to_hash
        table = self._allocator.block_table.get(request_id, ())
        blocks = list(takewhile(names.__contains__, table))
        known = ((names[block], self._keys.get(block, (None, ""))) for block in blocks)
        keys = [key for _, (_, key) in takewhile(lambda x: x[0] == x[1][0], known)]
        first = len(keys)
        if part := tokens[first * slots : len(blocks) * slots]:
            keys += chain_keys(self._identity, part, slots, keys[-1] if keys else "")
            for block, key in zip(blocks[first:], keys[first:], strict=False):
                self._keys[block] = names[block], key
        if is_over:
            self._missed.discard(request_id)
            first = 0
        if first < len(keys):
            self._store.write(keys, lambda places: self._copy([blocks[at] for at in places]), first)
        if is_over:
            self._store.touch(keys)

    def _copy(self, blocks: list[int]) -> Iterator[Page]:
        # One after the other: the engine's memory plan has no room for a copy of many blocks.
        return (Page([self._rows[block].to("cpu", copy=True)], None) for block in blocks)


def synchronize(device: torch.device) -> None:
    """Wait for everything that runs on a device."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
