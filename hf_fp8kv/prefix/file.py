"""The content of a file with one page of a prefix, and its name."""

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import torch as safetensors

# Changes with what the numbers in a file mean.
_FORMAT = "hf_fp8kv.prefix.2"
# Where the digest will be.
_NO_DIGEST = 64 * "0"


class Page(NamedTuple):
    """The numbers of one page of tokens.

    Attributes:
        tensors: of all layers, by name, on the CPU.
        facts: what else there is to say of them; goes through JSON.
    """

    tensors: dict[str, torch.Tensor]
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


def pack(key: str, page: Page) -> tuple[bytes, memoryview]:
    """Return the content of a file, in two parts."""
    facts = json.dumps(page.facts)
    header = {"format": _FORMAT, "key": key, "facts": facts, "digest": _NO_DIGEST}
    head, body = _split(safetensors.save(page.tensors, metadata=header))
    return head.replace(_entry(_NO_DIGEST), _entry(_digest(head, body))), body


def unpack(key: str, data: bytes) -> Page:
    """Return the page in the content of a file; raises one of many errors if it is not one."""
    head, body = _split(data)
    header = json.loads(head[8:])["__metadata__"]
    digest, facts = header["digest"], header["facts"]
    if header["format"] != _FORMAT or header["key"] != key:
        raise ValueError("another format, or another page than its name says")
    if digest != _digest(head.replace(_entry(digest), _entry(_NO_DIGEST)), body):
        raise ValueError("its bytes are not those that were written")
    return Page(safetensors.load(data), json.loads(facts))


def _split(data: bytes) -> tuple[bytes, memoryview]:
    """Return the header of a safetensors file with its length, and the bytes of the tensors."""
    start = 8 + int.from_bytes(data[:8], "little")
    return data[:start], memoryview(data)[start:]


def _entry(digest: str) -> bytes:
    # Quotes are escaped within strings, so that this is the entry and nothing else.
    return f'"digest":"{digest}"'.encode()


def _digest(head: bytes, body: memoryview) -> str:
    digest = hashlib.sha256(head)
    digest.update(body)
    return digest.hexdigest()
