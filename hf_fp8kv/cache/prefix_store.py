"""`PrefixStore`: pages of prefixes in a folder, for this process and others, now and later.

A file holds one page of tokens, of all layers. Its name is a hash of these tokens, of all tokens
before them, and of everything else that its numbers depend on: whoever looks for a name finds the
right numbers, or nothing. The folder is the index: a file is in it from the moment when it is
renamed to its name, whole, until it is removed.

Files are read in one go, and not mapped: what is used is then what was checked, and a file that
somebody cuts off meanwhile is an error, where a map would end the process.
"""

import errno
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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
_NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}")
_UNFINISHED = re.compile(rf"\.{_NAME.pattern}{re.escape(_PARTIAL)}")
# A link leads out of the folder, and a pipe would never answer. (Windows has none of these.)
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
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
        self.max_bytes = max_bytes
        try:
            self.path = Path(path).expanduser().absolute()
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"path: expected a folder, or a place for one, got {str(path)!r}: {error}; name "
                "another one"
            ) from error
        self._counts = dict.fromkeys(StoreUsage._fields[2:], 0)
        self._refused: set[str] = set()
        self._mutex = threading.Lock()
        self._writes, self._is_bounded, self._patience = True, False, _PATIENCE

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), max_bytes=self.max_bytes), (str(self.path),)

    def usage(self) -> StoreUsage:
        """Return what the folder holds now, and what this process had of it."""
        files = self._scan()
        return StoreUsage(len(files), sum(size for _, size, _ in files), **self.counts())

    def counts(self) -> dict[str, int]:
        """Return what this process had of the folder, without a look at it: a part of `usage`."""
        with self._mutex:
            return dict(self._counts)

    def count(self, **numbers: int) -> None:
        """Add to the numbers of `usage`."""
        with self._mutex:
            for name, number in numbers.items():
                self._counts[name] += number

    # -- reading -----------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether there is something under a key; it may turn out to be damaged."""
        return key not in self._refused and os.path.lexists(self._file(key))

    def read(self, key: str, check: Callable[[Page], None]) -> Page | None:
        """Return the page under a key; None if there is none that is whole. Raises nothing.

        `check`: raises ValueError, or what bad data makes it raise, for a page that cannot be used.
        """
        if not self._is_bounded:
            self._is_bounded = True
            self._hold_bound()
        if key in self._refused:
            return None
        try:
            data = _read_file(self._file(key), self.max_bytes)
            page = _unpack(key, data)
            check(page)
        except FileNotFoundError:
            return None
        except (OSError, MemoryError) as error:
            # It may be good all the same: too many open files, or those of another user.
            self._refused.add(key)
            self.count(files_refused=1)
            why = getattr(error, "strerror", None) or type(error).__name__
            warn_once(logger, f"{self}: pages that cannot be read ({why}) are ignored")
            return None
        except (SafetensorError, ArithmeticError, LookupError, ValueError, TypeError,
                AttributeError, RuntimeError) as error:  # fmt: skip
            self.refuse(key, error)
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

    def refuse(self, key: str, error: Exception) -> None:
        """Ignore a file from now on, with a warning, and remove it if that is possible."""
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
        self, keys: Sequence[str], make: Callable[[list[int]], Iterable[Page]], first: int = 0
    ) -> None:
        """Store the pages of a text that are not there yet. Raises nothing that a disk causes.

        Args:
            keys: of all its pages, from the first token on.
            make: returns the pages at these places.
            first: the first place that `make` can be asked for. If the page before it is not there
                the others are of no use, and are not stored.
        """
        missing = []
        for at in range(max(first - 1, 0), len(keys)):
            if self.has(keys[at]):
                continue
            if at < first or keys[at] in self._refused:
                keys = keys[:at]
                break
            missing.append(at)
        if missing and self._writes:
            pages = make(missing)
            try:
                with self._lock(self._patience) as is_ours:
                    # Who writes for so long may have been stopped: not to be waited for each time.
                    self._patience = _PATIENCE if is_ours else 0.0
                    if is_ours:
                        self._write(keys, missing, pages)
            except (OSError, ImportError) as error:
                self._writes = False
                warn_once(
                    logger,
                    f"{self} stores nothing from now on ({type(error).__name__}: {error}); what it "
                    "holds is still read",
                )

    def _write(self, keys: Sequence[str], missing: list[int], pages: Iterable[Page]) -> None:
        # Whatever is unfinished belongs to a process that is gone: the lock is ours.
        for name in os.listdir(self.path):
            if _UNFINISHED.fullmatch(name):
                with suppress(OSError):  # somebody's folder, or not ours to remove
                    (self.path / name).unlink()
        kept = {self._file(key).name for key in keys}
        files = sorted(self._scan())
        own = sum(size for _, size, name in files if name in kept)
        others = [file for file in files if file[2] not in kept]
        for at, page in zip(missing, pages, strict=True):
            if self.has(keys[at]):
                continue  # another process was faster
            data = _pack(keys[at], page)
            own += len(data)
            if own > self.max_bytes:
                return  # the text alone takes all there is: its beginning is stored
            self._evict(others, self.max_bytes - own)
            target = self._file(keys[at])
            unfinished = target.with_name(f".{target.name}{_PARTIAL}")
            if os.path.lexists(unfinished):  # could not be removed; a link would be followed
                raise FileExistsError(str(unfinished))
            try:
                unfinished.write_bytes(data)
                os.replace(unfinished, target)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            self.count(bytes_written=len(data))

    def _evict(self, files: list[tuple[int, int, str]], most: int) -> None:
        """Remove the first of these files, and from the list, until the others take `most`."""
        total = sum(size for _, size, _ in files)
        while files and total > most:
            _, size, name = files.pop(0)
            (self.path / name).unlink(missing_ok=True)
            total -= size

    def _hold_bound(self) -> None:
        """Remove what is over the bound, which was a larger one before; not if others write."""
        with suppress(OSError, ImportError), self._lock(0.0) as is_ours:
            if is_ours:
                self._evict(sorted(self._scan()), self.max_bytes)

    def _scan(self) -> list[tuple[int, int, str]]:
        """Return time, size and name of each page in the folder."""
        files = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if not _NAME.fullmatch(entry.name):
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
    def _lock(self, patience: float) -> Iterator[bool]:
        """Hold the folder's lock, which a killed process gives back; False: others are writing.

        `patience`: seconds to wait for them.
        """
        import fcntl  # not on Windows

        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
        is_ours, end = False, time.monotonic() + patience
        try:
            while not is_ours:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_ours = True
                except BlockingIOError:
                    if time.monotonic() >= end:
                        break
                    time.sleep(0.01)
            yield is_ours
        finally:
            if is_ours:
                # A process that was forked meanwhile has the handle, too.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


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


def _read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file, and of nothing else; raises OSError or ValueError."""
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
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


def _header(data: bytes) -> Any:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])


def _digest(key: str, facts: str, data: bytes) -> str:
    """Return a digest of the tensors in a safetensors file, of names, shapes and bytes alike."""
    size = int.from_bytes(data[:8], "little")
    tensors = {name: x for name, x in _header(data).items() if name != "__metadata__"}
    described = json.dumps([_FORMAT, key, facts, tensors], sort_keys=True)
    digest = hashlib.sha256(described.encode())
    digest.update(memoryview(data)[8 + size :])
    return digest.hexdigest()
