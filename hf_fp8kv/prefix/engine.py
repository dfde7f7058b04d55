"""Exchange of full blocks between an engine and a `PrefixStore`.

The engine keeps full blocks without users, under a hash of their tokens, until it needs the memory.
Blocks of a prompt that are in the store are added to these, so that the engine finds them.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from .file import Page, chain_keys
from .store import PrefixStore


class StoredBlocks:
    """The blocks of one allocator, and a store. Only the engine's thread uses it.

    `identity` is everything that the bytes depend on, except the tokens.
    """

    def __init__(self, store: PrefixStore, identity: str, allocator: Any) -> None:
        self._store, self._allocator = store, allocator
        self._slots, self._rows = int(allocator.tokens_per_page), allocator._copy_view
        self._pool, self._index = allocator.pool, allocator.index
        self._identity = f"{identity}.blocks.{self._rows.shape[1]}"
        # The engine's hash and the key in the store of each block that was full. An entry is valid
        # while the engine has the same hash for the block.
        self._keys: dict[int, tuple[int, str]] = {}
        self._missed: set[str] = set()  # requests, which call `fetch` in each step while they wait

    def fetch(self, request_id: str, tokens: list[int]) -> None:
        """Load the beginning of a prompt from the store to blocks that the engine keeps for reuse.

        Stops when no block is free. At least one token is left to compute.
        """
        allocator, slots = self._allocator, self._slots
        max_blocks, known = (len(tokens) - 1) // slots, len(allocator.match_prefix_blocks(tokens))
        blocks: list[int] = []
        requested: list[tuple[int, str]] = []

        def missing_keys() -> Iterator[str]:
            key, name = "", None
            for index in range(max_blocks if known < max_blocks else 0):
                part = tokens[index * slots : (index + 1) * slots]
                (key,) = chain_keys(self._identity, part, slots, key)
                name = cache_allocator.compute_block_hash(name, part)
                if name not in allocator.ledger.hash_to_block:
                    requested.append((name, key))
                    yield key
                # otherwise still cached, although an earlier block was evicted

        if self._has_room():
            for page in self._store.read(missing_keys(), self._check):
                if not blocks:
                    synchronize(self._rows.device)  # a running step may still write to free blocks
                name, key = requested[len(blocks)]
                blocks.append(self._put(page))
                allocator.ledger.register_new_hash(blocks[-1], name)
                self._keys[blocks[-1]] = name, key
                if not self._has_room():
                    break
        if requested and not known and not blocks and request_id not in self._missed:
            self._missed.add(request_id)
            self._store.count(misses=1)
        if blocks:
            synchronize(self._rows.device)  # the engine computes on a different stream
            # A released block with a hash is kept. A prompt's last block is evicted first.
            for block in reversed(blocks):
                allocator.ledger.release(block)
            self._store.count(hits=1, tokens_found=len(blocks) * slots)

    def _check(self, page: Page) -> None:
        if page.facts is not None or [*map(len, page.rows)] != [self._rows.shape[1]]:
            raise ValueError("not a block of this engine")

    def _has_room(self) -> bool:
        return bool(self._pool.count_free_blocks(self._index) or self._pool.num_free_sectors)

    def _put(self, page: Page) -> int:
        """Copy a page to a free block, take the block, and return its number."""
        if not self._pool.count_free_blocks(self._index):
            self._pool.allocate_sector(self._index)
        (block,) = self._pool.get_free_blocks(self._index, 1)
        self._rows[block].copy_(page.rows[0])
        return int(block)

    def keep(self, request_id: str, tokens: list[int], *, is_over: bool = False) -> None:
        """Store the blocks of a request that were filled since the last call.

        With `is_over`, before the engine frees the blocks, also mark all of them as used, and store
        blocks again that are no longer in the store.
        """
        slots, names = self._slots, self._allocator.ledger.block_to_hash
        table = self._allocator.block_table.get(request_id, ())
        blocks = list(takewhile(names.__contains__, table))
        pairs = ((names[block], self._keys.get(block, (None, ""))) for block in blocks)
        keys = [key for _, (_, key) in takewhile(lambda x: x[0] == x[1][0], pairs)]
        first = len(keys)
        if part := tokens[first * slots : len(blocks) * slots]:
            keys += chain_keys(self._identity, part, slots, keys[-1] if keys else "")
            for block, key in zip(blocks[first:], keys[first:], strict=False):
                self._keys[block] = names[block], key
        if is_over:
            self._missed.discard(request_id)
            first = 0
        if first < len(keys):
            self._store.write(
                keys, lambda indices: self._copy([blocks[at] for at in indices]), first
            )
        if is_over:
            self._store.touch(keys)

    def _copy(self, blocks: list[int]) -> Iterator[Page]:
        # One at a time, because the engine's memory plan leaves no room for copies of many blocks.
        return (Page([self._rows[block].to("cpu", copy=True)], None) for block in blocks)


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
