"""Exchange full blocks between an engine and a `PrefixStore`.

The engine keeps unused full blocks under a hash of their tokens, until it needs the memory.
`load` adds the stored blocks of a prompt to these blocks, so that the engine finds them.
"""

import hashlib
from array import array
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch

from ..utils.digests import compute_digest
from .file import StoredPage, chain_keys
from .store import PrefixStore


class BlockHasher:
    """Computes the hashes of an engine's full blocks, instead of transformers' 64-bit hash.

    A hash begins with 128 bits of keyed BLAKE2b over the salt and all earlier tokens. It ends with
    the tokens of the block, so blocks with equal hashes have equal tokens. Prompts with equal
    hashes cannot be searched for without the key.

    Attributes:
        salt: Salt of the request whose blocks are hashed next. Requests with different salts share
            no block.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.salt = ""

    def __call__(self, previous_hash: bytes | None, tokens: list[int]) -> bytes:
        """Return the hash of a block, after the block with `previous_hash`, if any."""
        if previous_hash is None:
            previous_hash = compute_digest(self.salt).encode()
        prefix = hashlib.blake2b(previous_hash, digest_size=16, key=self._key)
        return prefix.digest() + array("i", tokens).tobytes()


class BlockExchange:
    """Exchange of the blocks of one allocator with a store, in the engine's thread only.

    `identity` identifies everything that the bytes depend on, except the tokens. `hasher` is the
    hasher of the allocator.
    """

    def __init__(
        self, store: PrefixStore, identity: str, allocator: Any, hasher: BlockHasher
    ) -> None:
        self._store = store
        self._allocator = allocator
        self._hasher = hasher
        self._block_size = int(allocator.tokens_per_page)
        self._block_rows = allocator._copy_view
        self._pool = allocator.pool
        self._group_index = allocator.index
        self._identity = f"{identity}.blocks.{self._block_rows.shape[1]}"
        # The engine's hash and the store's key of each block that has been full. The key is valid
        # while the engine has the same hash for the block.
        self._hashes_and_keys: dict[int, tuple[bytes, str]] = {}
        self._missed_requests: set[str] = set()  # ids of requests whose miss has been counted

    def load(self, request_id: str, tokens: list[int]) -> None:
        """Load the beginning of a prompt from the store into free blocks, and register the blocks.

        Loading stops when no block is free. At least one token is left to compute.
        """
        allocator = self._allocator
        num_cached = len(allocator.match_prefix_blocks(tokens))
        max_blocks = (len(tokens) - 1) // self._block_size
        blocks: list[int] = []
        missing_blocks: list[tuple[bytes, str]] = []  # hash and key

        def find_missing_keys() -> Iterator[str]:
            key = ""
            block_hash = None
            for index in range(max_blocks):
                block_tokens = tokens[index * self._block_size : (index + 1) * self._block_size]
                (key,) = self._chain_keys(block_tokens, key)
                block_hash = self._hasher(block_hash, block_tokens)
                if block_hash not in allocator.ledger.hash_to_block:
                    missing_blocks.append((block_hash, key))
                    yield key
                # Otherwise the block is cached. An earlier block may have been evicted.

        try:
            can_load = num_cached < max_blocks and self._has_free_block()
            pages = self._store.read(find_missing_keys(), self._check_page) if can_load else ()
            for page in pages:
                if not blocks:  # a running step may still write to free blocks
                    synchronize(self._block_rows.device)
                block_hash, key = missing_blocks[len(blocks)]
                blocks.append(self._allocate_block())
                self._block_rows[blocks[-1]].copy_(page.rows[0])
                allocator.ledger.register_new_hash(blocks[-1], block_hash)
                self._hashes_and_keys[blocks[-1]] = block_hash, key
                if not self._has_free_block():
                    break
            if blocks:
                synchronize(self._block_rows.device)  # the engine computes on another stream
        finally:
            # A released block stays cached by its hash. The block released first is evicted first.
            for block in reversed(blocks):
                if allocator.ledger.release(block):  # it has no hash, because loading failed
                    self._pool.free_blocks(self._group_index, [block])
        is_first_miss = missing_blocks and request_id not in self._missed_requests
        if is_first_miss and not num_cached and not blocks:
            self._missed_requests.add(request_id)
            self._store.add_counts(misses=1)
        if blocks:
            self._store.add_counts(hits=1, tokens_found=len(blocks) * self._block_size)

    def _chain_keys(self, tokens: list[int], previous_key: str) -> list[str]:
        """Return the store's keys of the full blocks of `tokens`. See `chain_keys`."""
        identity = self._identity
        if self._hasher.salt:
            identity += f".{compute_digest(self._hasher.salt)}"
        return chain_keys(identity, tokens, self._block_size, previous_key)

    def _check_page(self, page: StoredPage) -> None:
        if page.metadata is not None or list(map(len, page.rows)) != [self._block_rows.shape[1]]:
            raise ValueError("not a block of this engine")

    def _has_free_block(self) -> bool:
        return bool(self._pool.count_free_blocks(self._group_index) or self._pool.num_free_sectors)

    def _allocate_block(self) -> int:
        """Return the number of a block that was free."""
        if not self._pool.count_free_blocks(self._group_index):
            self._pool.allocate_sector(self._group_index)
        (block,) = self._pool.get_free_blocks(self._group_index, 1)
        return int(block)

    def save(self, request_id: str, tokens: list[int], *, is_last: bool = False) -> None:
        """Write to the store the blocks of a request that were filled since the previous call.

        `is_last` means that the engine frees the blocks after this call. All blocks are then marked
        as used, and blocks that the store has evicted are written again.
        """
        hashes = self._allocator.ledger.block_to_hash
        table = self._allocator.block_table.get(request_id, ())
        blocks = list(takewhile(hashes.__contains__, table))
        keys: list[str] = []
        for block in blocks:
            block_hash, key = self._hashes_and_keys.get(block, (None, ""))
            if block_hash != hashes[block]:
                break
            keys.append(key)
        num_known = len(keys)
        if new_tokens := tokens[num_known * self._block_size : len(blocks) * self._block_size]:
            keys += self._chain_keys(new_tokens, keys[-1] if keys else "")
            for block, key in zip(blocks[num_known:], keys[num_known:], strict=False):
                self._hashes_and_keys[block] = hashes[block], key
        if is_last:
            self._missed_requests.discard(request_id)
            num_known = 0
        if num_known < len(keys):
            self._store.write(
                keys,
                lambda indices: self._copy_blocks([blocks[index] for index in indices]),
                num_known,
            )
        if is_last:
            self._store.touch(keys)

    def _copy_blocks(self, blocks: list[int]) -> Iterator[StoredPage]:
        # Blocks are copied one by one, because the engine leaves no memory to copy many at once.
        return (
            StoredPage([self._block_rows[block].to("cpu", copy=True)], None) for block in blocks
        )


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
