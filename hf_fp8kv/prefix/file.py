"""The content of a file with one page of a prefix, and its name."""

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import torch as safetensors

from ..utils.digests import digest_of

# Changes with what the bytes in a file mean.
_FORMAT = "hf_fp8kv.prefix.3"


class Page(NamedTuple):
    """The bytes of one page of tokens.

    Attributes:
        rows: the page of each layer as its pool has it, or one block of an engine. Each is
            `[bytes]`, uint8, on the CPU.
        facts: everything else that a reader needs, for JSON.
    """

    rows: list[torch.Tensor]
    facts: Any


def chain_keys(identity: str, ids: Any, page_size: int, after: str = "") -> list[str]:
    """Return the key of each full page of one text: a hash of it and of all that is before it.

    `ids` are whole numbers, `[N]`, on the CPU, with -1 for padding; `identity` says what else the
    numbers depend on; `after` is the key of the page before them, if they are not the beginning.
    """
    data = np.asarray(ids, "<i8")
    keys, last = [], bytes.fromhex(after) or f"{_FORMAT}.{identity}".encode()
    for start in range(0, len(data) - page_size + 1, page_size):
        digest = hashlib.sha256(last + b"\0" + data[start : start + page_size].tobytes())
        last = digest.digest()
        keys.append(digest.hexdigest())
    return keys


def pack(key: str, page: Page) -> bytes:
    """Return the content of a file."""
    rows = {str(layer): row for layer, row in enumerate(page.rows)}
    header = {"format": _FORMAT, "key": key, "facts": json.dumps(page.facts)}
    header["digest"] = digest_of(header, rows)
    return safetensors.save(rows, metadata=header)


def unpack(key: str, data: bytes) -> Page:
    """Return the page in the content of a file; raises one of many errors if it is not one."""
    rows = safetensors.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    if header.pop("digest") != digest_of(header, rows):
        raise ValueError("its bytes are not those that were written")
    if header["format"] != _FORMAT or header["key"] != key:
        raise ValueError("another format, or another page than its name says")
    if any((row.dtype, row.ndim) != (torch.uint8, 1) for row in rows.values()):
        raise ValueError("not rows of bytes")
    return Page([rows[str(layer)] for layer in range(len(rows))], json.loads(header["facts"]))
