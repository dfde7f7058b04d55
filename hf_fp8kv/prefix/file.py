"""The content of a file with one page of a prefix, and its name."""

import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import torch as safetensors

from .folder import OPEN_FLAGS

# Changes with what the numbers in a file mean.
_FORMAT = "hf_fp8kv.prefix.1"
# Where the digest will be.
_NO_DIGEST = 64 * "0"


Tensors = dict[str, torch.Tensor]


class Page(NamedTuple):
    """The numbers of one page of tokens.

    Attributes:
        tensors: of all layers, by name, on the CPU.
        facts: what else there is to say of them; goes through JSON.
    """

    tensors: Tensors
    facts: Any


def chain_keys(identity: str, ids: torch.Tensor, page_size: int, after: str = "") -> list[str]:
    """Return the key of each full page of one text: a hash of it and of all that is before it.

    `ids` is `[N]`, int64, with -1 for padding; `identity` says what else the numbers depend on;
    `after` is the key of the page before them, if they are not the beginning.
    """
    data = ids.cpu().numpy().astype("<i8")
    keys, last = [], bytes.fromhex(after) or f"{_FORMAT}.{identity}".encode()
    for start in range(0, len(data) - page_size + 1, page_size):
        digest = hashlib.sha256(last + b"\0" + data[start : start + page_size].tobytes())
        last = digest.digest()
        keys.append(digest.hexdigest())
    return keys


def read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file, and of nothing else; raises OSError or ValueError."""
    try:
        handle = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("a link") from error
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise ValueError("not a file, or larger than the whole store may be")
        with open(handle, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(handle)


def pack(key: str, page: Page) -> tuple[bytes, memoryview]:
    """Return the content of a file, in two parts."""
    facts = json.dumps(page.facts, sort_keys=True)
    header = {"format": _FORMAT, "key": key, "facts": facts, "digest": _NO_DIGEST}
    data = safetensors.save(page.tensors, metadata=header)
    start = _start_of_tensors(data)
    digest = _digest(key, facts, data)
    # Quotes are escaped within strings, so that this is the entry and nothing else.
    head = data[:start].replace(
        f'"digest":"{_NO_DIGEST}"'.encode(), f'"digest":"{digest}"'.encode()
    )
    return head, memoryview(data)[start:]


def unpack(key: str, data: bytes) -> Page:
    """Return the page in the content of a file; raises one of many errors if it is not one."""
    header = _header(data).get("__metadata__", {})
    if header.get("format") != _FORMAT or header.get("key") != key:
        raise ValueError("another format, or another page than its name says")
    if header["digest"] != _digest(key, header["facts"], data):
        raise ValueError("its bytes are not those that were written")
    return Page(safetensors.load(data), json.loads(header["facts"]))


def _start_of_tensors(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _header(data: bytes) -> Any:
    return json.loads(data[8 : _start_of_tensors(data)])


def _digest(key: str, facts: str, data: bytes) -> str:
    """Return a digest of the tensors in a safetensors file, of names, shapes and bytes alike."""
    tensors = {name: x for name, x in _header(data).items() if name != "__metadata__"}
    described = json.dumps([_FORMAT, key, facts, tensors], sort_keys=True)
    digest = hashlib.sha256(described.encode())
    digest.update(memoryview(data)[_start_of_tensors(data) :])
    return digest.hexdigest()
