"""Full blocks of an engine's pages in a `PrefixStore`: found before a prompt is computed, and left.

The engine keeps full blocks that nobody uses, under a hash of their tokens, until it needs the
room. What a store has of a prompt is put among them, where the engine then finds it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from .file import Page, chain_keys
from .store import PrefixStore

_NAME = "block"


class StoredBlocks:
    """The blocks of one allocator, and a store; `identity` says what else their bytes depend on.

    The engine's thread alone uses it.
    """

    def __init__(self, store: PrefixStore, identity: str, allocator: Any) -> None:
        self._store, self._allocator = store, allocator
        self._slots, self._rows = int(allocator.tokens_per_page), allocator._copy_view
        self._device: torch.device = self._rows.device
        self._identity = f"{identity}.blocks.{self._rows.width}"
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
                (key,) = chain_keys(self._identity, torch.tensor(part, device="cpu"), slots, key)
                name = cache_allocator.compute_block_hash(name, part)
                if name not in allocator.ledger.hash_to_block:
                    asked.append((name, key))
                    yield key
                # else still cached, although a block before it was evicted

        if self._has_room():
            for page in self._store.read(wanted(), self._check):
                if not blocks:
                    self._wait()  # a step that runs may still write to what is free
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
            self._wait()  # the engine computes on another stream
            # A block with a hash is kept for reuse, the last one to be given up first.
            for block in reversed(blocks):
                allocator.ledger.release(block)
            self._store.count(hits=1, tokens_found=len(blocks) * slots)

    def _check(self, page: Page) -> None:
        """Raise ValueError for a page that is no block of this engine; see `PrefixStore.read`."""
        row, expected = page.tensors[_NAME], ((self._rows.width,), torch.uint8)
        if page.facts or len(page.tensors) > 1 or (row.shape, row.dtype) != expected:
            raise ValueError("not a block of this engine")

    def _has_room(self) -> bool:
        pool, index = self._allocator.pool, self._allocator.index
        return bool(pool.count_free_blocks(index) or pool.num_free_sectors)

    def _put(self, page: Page) -> int:
        """Copy a page to a free block, which is not free any more, and return that."""
        pool, index = self._allocator.pool, self._allocator.index
        if not pool.count_free_blocks(index):
            pool.allocate_sector(index)
        (block,) = pool.get_free_blocks(index, 1)
        self._rows.index_copy_(0, self._place(block), page.tensors[_NAME][None].to(self._device))
        return int(block)

    def _place(self, block: int) -> torch.Tensor:
        return torch.tensor([block], device=self._device)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def keep(self, request_id: str, tokens: list[int]) -> None:
        """Store the blocks of a request that are full since the last time."""
        keys, new = self._find_keys(request_id, tokens)
        if new:
            self._write(request_id, keys, len(keys) - new)

    def finish(self, request_id: str) -> None:
        """Note that the blocks of a request were used, and store those that are gone from there.

        Before the engine gives the blocks up.
        """
        self._missed.discard(request_id)
        keys, _ = self._find_keys(request_id, [])
        if keys:
            self._write(request_id, keys, 0)
            self._store.touch(keys)

    def _find_keys(self, request_id: str, tokens: list[int]) -> tuple[list[str], int]:
        """Return the keys of a request's full blocks, and how many at the end are new."""
        slots, names = self._slots, self._allocator.ledger.block_to_hash
        table = self._allocator.block_table.get(request_id, ())
        keys: list[str] = []
        full = 0
        for block in table:
            if block not in names:
                break
            known, key = self._keys.get(block, (None, ""))
            if known == names[block] and full == len(keys):
                keys.append(key)
            full += 1
        known_ones = len(keys)
        if part := tokens[known_ones * slots : full * slots]:
            after = keys[-1] if keys else ""
            keys += chain_keys(self._identity, torch.tensor(part, device="cpu"), slots, after)
            for block, key in zip(table[known_ones:], keys[known_ones:], strict=False):
                self._keys[block] = names[block], key
        return keys, len(keys) - known_ones

    def _write(self, request_id: str, keys: list[str], first: int) -> None:
        table = self._allocator.block_table[request_id]
        # One after the other: the engine's memory plan has no room for a copy of many blocks.
        self._store.write(keys, lambda places: (self._copy(table[at]) for at in places), first)

    def _copy(self, block: int) -> Page:
        return Page({_NAME: self._rows.index_select(0, self._place(block))[0].cpu()}, {})
