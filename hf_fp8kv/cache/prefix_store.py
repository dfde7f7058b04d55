"""`PrefixStore`: pages of prefixes in a folder, for this process and others, now and later.

A file holds one page of tokens, of all layers. Its name is a hash of these tokens, of all tokens
before them, and of everything else that its numbers depend on: whoever looks for a name finds the
right numbers, or nothing. The folder is the index: a file is in it from the moment when it is
renamed to its name, whole, until it is removed.

Files are read in one go, and not mapped: what is used is then what was checked, and a file that
somebody cuts off meanwhile is an error, where a map would end the process.
"""

import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors

from ..errors import ConfigError
from ..utils.warn_once import warn_once

logger = logging.getLogger(__name__)

# Changes with what the numbers in a file mean.
_FORMAT = "hf_fp8kv.prefix.1"
_SUFFIX, _PARTIAL, _LOCK = ".safetensors", ".part", ".lock"
_DIGITS = 64
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
DEFAULT_BYTES = 16 << 30
# Seconds to wait for other processes that are writing.
_PATIENCE = 2.0

Tensors = dict[str, torch.Tensor]


class Page(NamedTuple):
    """The numbers of one page of tokens.

    Attributes:
        tensors: of all layers, by name, on the CPU.
        facts: what else there is to say of them; goes through JSON.
    """

    tensors: Tensors
    facts: Any


class StoreUsage(NamedTuple):
    """What a store holds, and what this process had of it.

    Attributes:
        files: pages in the folder now, of all models and processes.
        bytes: their size.
        hits: texts that found a beginning here.
        misses: texts that did not.
        tokens_found: tokens of hits, over all sequences.
        bytes_read: of files, in hits.
        bytes_written: of files.
        files_refused: damaged or foreign files that were met.
    """

    files: int
    bytes: int
    hits: int
    misses: int
    tokens_found: int
    bytes_read: int
    bytes_written: int
    files_refused: int


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    tokens_found: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    files_refused: int = 0


class PrefixStore:
    """A folder with pages of prefixes, which outlive the process.

    ```python
    store = PrefixStore("~/.cache/prefixes", max_bytes=8 << 30)
    enable(model, prefix_store=store)
    ```

    Several processes may share the folder. A file that is damaged, or not what its name says, is
    ignored with a warning and removed. Where nothing can be written any more (a full disk, no
    permission), nothing is stored from then on, which is logged once; reading goes on.

    Args:
        path: the folder; made if it is not there. "~" is the home folder.
        max_bytes: the most that the files may take; the least recently used go first.

    Raises:
        ConfigError: the folder cannot be made, or a number below 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ConfigError(
                f"max_bytes: expected a whole number of bytes above 0, got {max_bytes!r}; leave it "
                f"out for {DEFAULT_BYTES}"
            )
        self.path, self.max_bytes = Path(path).expanduser(), max_bytes
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"path: expected a folder, or a place for one, got {str(self.path)!r}: {error}; "
                "name another one"
            ) from error
        self._counts = _Counts()
        self._refused: set[str] = set()
        self._mutex = threading.Lock()
        self.is_writing = True

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (str(self.path), self.max_bytes)

    def usage(self) -> StoreUsage:
        """Return what the folder holds now, and what this process had of it."""
        files = self._scan()
        size = sum(size for _, size, _ in files)
        return StoreUsage(len(files), size, **self.counts())

    def counts(self) -> dict[str, int]:
        """Return what this process had of the folder, without a look at it: a part of `usage`."""
        with self._mutex:
            return dict(vars(self._counts))

    def count(self, **numbers: int) -> None:
        """Add to the numbers of `usage`."""
        with self._mutex:
            for name, number in numbers.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)

    # -- reading -----------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether there is something under a key; it may turn out to be damaged."""
        return key not in self._refused and os.path.lexists(self._file(key))

    def read(self, key: str) -> Page | None:
        """Return the page under a key; None if there is none that is whole. Raises nothing."""
        if key in self._refused:
            return None
        try:
            data = _read_file(self._file(key), self.max_bytes)
            page = _unpack(key, data)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ArithmeticError, LookupError, ValueError, TypeError,
                AttributeError, RuntimeError, MemoryError) as error:  # fmt: skip
            self._refuse(key, error)
            return None
        self.count(bytes_read=len(data))
        return page

    def touch(self, keys: Sequence[str]) -> None:
        """Note that the pages of a text were used: the first ones the most recently."""
        now = time.time_ns()
        for at, key in enumerate(keys):
            try:
                os.utime(self._file(key), ns=(now - at, now - at), follow_symlinks=False)
            except OSError:
                continue  # removed by another process, or not ours to touch

    def _file(self, key: str) -> Path:
        return self.path / f"{key}{_SUFFIX}"

    def _refuse(self, key: str, error: Exception) -> None:
        """Ignore a file from now on, and remove it if that is possible."""
        self._refused.add(key)
        self.count(files_refused=1)
        logger.warning(
            "prefix store: %s is not a page that this library wrote (%s: %s); it is ignored, and "
            "removed if possible",
            self._file(key), type(error).__name__, error,
        )  # fmt: skip
        try:
            os.unlink(self._file(key))
        except OSError:
            return  # a folder, or not ours to remove
        self._refused.discard(key)

    # -- writing -----------------------------------------------------------------------------

    def write(
        self, keys: Sequence[str], make: Callable[[list[int]], list[Page]], first: int = 0
    ) -> None:
        """Store the pages of a text that are not there yet. Raises nothing that a disk causes.

        Args:
            keys: of all its pages, from the first token on.
            make: returns the pages at these places.
            first: the first place that `make` can be asked for. Without one before it that is not
                there the others are of no use, and are not stored.
        """
        missing = []
        for at, key in enumerate(keys):
            if self.has(key):
                continue
            if at < first or key in self._refused:
                keys = keys[:at]
                break
            missing.append(at)
        if missing and self.is_writing:
            pages = make(missing)
            try:
                with self._lock() as is_ours:
                    if is_ours:
                        self._write(keys, missing, pages)
            except (OSError, ImportError) as error:
                self.is_writing = False
                warn_once(
                    logger,
                    f"{self} stores nothing from now on ({type(error).__name__}: {error}); what it "
                    "holds is still read",
                )
        self.touch(keys)

    def _write(self, keys: Sequence[str], missing: list[int], pages: list[Page]) -> None:
        # Whatever is unfinished belongs to a process that is gone: the lock is ours.
        for name in os.listdir(self.path):
            if name.endswith(_PARTIAL):
                with suppress(OSError):  # somebody's folder, or not ours to remove
                    (self.path / name).unlink()
        files = sorted(self._scan())
        total = sum(size for _, size, _ in files)
        kept = {f"{key}{_SUFFIX}" for key in keys}
        files = [file for file in files if file[2] not in kept]
        for at, page in zip(missing, pages, strict=True):
            data = _pack(keys[at], page)
            while files and total + len(data) > self.max_bytes:
                _, size, name = files.pop(0)
                (self.path / name).unlink(missing_ok=True)
                total -= size
            if total + len(data) > self.max_bytes:
                return  # the text alone takes all there is: its beginning is stored
            target = self._file(keys[at])
            partial = target.with_name(f".{target.name}{_PARTIAL}")
            if os.path.lexists(partial):  # could not be removed; a link would be followed
                raise FileExistsError(str(partial))
            try:
                partial.write_bytes(data)
                os.replace(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            total += len(data)
            self.count(bytes_written=len(data))

    def _scan(self) -> list[tuple[int, int, str]]:
        """Return time, size and name of each page in the folder."""
        files = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if len(entry.name) != _DIGITS + len(_SUFFIX) or _SUFFIX not in entry.name:
                        continue
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue  # another process was faster
                    if not stat.S_ISDIR(found.st_mode):
                        files.append((found.st_mtime_ns, found.st_size, entry.name))
        except OSError:
            return []
        return files

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the folder's lock, which a killed process gives back; False: others are writing."""
        import fcntl  # not on Windows

        handle = os.open(self.path / _LOCK, _OPEN_LOCK, 0o666)
        try:
            end = time.monotonic() + _PATIENCE
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > end:
                        yield False
                        return
                    time.sleep(0.01)
                else:
                    yield True
                    return
        finally:
            os.close(handle)


def _open(path: str, max_bytes: int) -> PrefixStore:
    return PrefixStore(path, max_bytes=max_bytes)


def chain_keys(identity: str, ids: torch.Tensor, page_size: int) -> list[str]:
    """Return the key of each full page of one text: a hash of it and of all that is before it.

    `ids` is `[N]`, int64, with -1 for padding; `identity` says what else the numbers depend on.
    """
    data = ids.cpu().numpy().astype("<i8")
    keys, last = [], f"{_FORMAT}.{identity}".encode()
    for start in range(0, len(data) - page_size + 1, page_size):
        digest = hashlib.sha256(last + b"\0" + data[start : start + page_size].tobytes())
        last = digest.digest()
        keys.append(digest.hexdigest())
    return keys


def _read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file, and of nothing else; raises OSError or ValueError."""
    # A link leads out of the folder, and a pipe would never answer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise ValueError("not a file, or larger than the whole store may be")
        return file.read(found.st_size)


def _pack(key: str, page: Page) -> bytes:
    """Return the content of a file."""
    facts = json.dumps(page.facts, sort_keys=True)
    digest = _digest(key, facts, safetensors.save(page.tensors))
    header = {"format": _FORMAT, "key": key, "facts": facts, "digest": digest}
    return safetensors.save(page.tensors, metadata=header)


def _unpack(key: str, data: bytes) -> Page:
    """Return the page in the content of a file; raises one of many errors if it is not one."""
    header = _header(data).get("__metadata__", {})
    if header.get("format") != _FORMAT or header.get("key") != key:
        raise ValueError("another format, or another page than its name says")
    if header["digest"] != _digest(key, header["facts"], data):
        raise ValueError("its bytes are not those that were written")
    return Page(safetensors.load(data), json.loads(header["facts"]))


def _header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header


def _digest(key: str, facts: str, data: bytes) -> str:
    """Return a digest of the tensors in a safetensors file, of names, shapes and bytes alike."""
    size = int.from_bytes(data[:8], "little")
    tensors = {name: x for name, x in _header(data).items() if name != "__metadata__"}
    described = json.dumps([_FORMAT, key, facts, tensors], sort_keys=True)
    digest = hashlib.sha256(described.encode())
    digest.update(memoryview(data)[8 + size :])
    return digest.hexdigest()
