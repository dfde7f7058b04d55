"""The name and the contents of a file with one page of a prefix."""

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import torch as safetensors

from ..utils.digests import compute_digest
from ..utils.files import parse_metadata

# Name and version of the file format. The version changes with the meaning of the bytes.
_FORMAT_VERSION = "hf_fp8kv.prefix.5"


class StoredPage(NamedTuple):
    """The bytes of one page of tokens.

    Attributes:
        rows: Contents of the page in the pool of each layer, or in one block of an engine. Each row
            is `[bytes]`, uint8, on the CPU.
        metadata: Other data that a reader needs, as JSON values.
    """

    rows: list[torch.Tensor]
    metadata: Any


def chain_keys(identity: str, ids: Any, page_size: int, previous_key: str = "") -> list[str]:
    """Return the key of each full page of a sequence: a hash of its tokens and all earlier tokens.

    Args:
        identity: Everything that the pages depend on, except the tokens.
        ids: Token ids, integers `[N]` on the CPU, -1 for padding.
        page_size: Tokens per page.
        previous_key: Key of the page before `ids`, or "" if the sequence begins with `ids`.
    """
    tokens = np.asarray(ids, "<i8")
    keys = []
    previous_bytes = bytes.fromhex(previous_key) or f"{_FORMAT_VERSION}.{identity}".encode()
    for start in range(0, len(tokens) - page_size + 1, page_size):
        digest = hashlib.sha256(
            previous_bytes + b"\0" + tokens[start : start + page_size].tobytes()
        )
        previous_bytes = digest.digest()
        keys.append(digest.hexdigest())
    return keys


def serialize_page(key: str, page: StoredPage) -> bytes:
    """Return the contents of a page's file."""
    rows = {str(index): row for index, row in enumerate(page.rows)}
    header = {"format": _FORMAT_VERSION, "key": key, "metadata": json.dumps(page.metadata)}
    header["digest"] = compute_digest(header, rows)
    return safetensors.save(rows, metadata=header)


def parse_page(key: str, contents: bytes) -> StoredPage:
    """Return the page in the contents of a file. Invalid contents may raise any type of error."""
    rows = safetensors.load(contents)
    header = parse_metadata(contents)
    if header.pop("digest") != compute_digest(header, rows):
        raise ValueError("its bytes have changed since they were written")
    if header["format"] != _FORMAT_VERSION or header["key"] != key:
        raise ValueError("the file has a different format, or belongs to another page")
    if any((row.dtype, row.ndim) != (torch.uint8, 1) for row in rows.values()):
        raise ValueError("its tensors are not vectors of uint8")
    return StoredPage(
        [rows[str(index)] for index in range(len(rows))], json.loads(header["metadata"])
    )
