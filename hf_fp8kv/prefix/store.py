"""`PrefixStore`: pages of prefixes in a folder, shared between processes and kept across runs.

A file holds one page of tokens, of all layers. Its name is a hash of these tokens, all tokens
before them, and everything else that the page depends on. A lookup therefore finds the right page
or nothing. The folder is the index: a file becomes visible, complete, when it is renamed, and stays
until it is removed.

Files are read completely instead of mapped, so that the checked bytes are the bytes that are used.
If a file is truncated in between, reading raises an error, but a mapping would end the process.
"""

import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from ..errors import ConfigError
from ..utils.warn_once import warn_once
from .file import Page, pack, unpack
from .folder import PrefixFolder

logger = logging.getLogger(__name__)

_NAMES = re.compile(r"[0-9a-f]{64}\.safetensors")
_NO_MEMORY = "{}: no memory for a copy of pages, which are not stored"
DEFAULT_BYTES = 16 << 30
# Seconds to wait for other processes that write, first and after a wait has timed out.
_PATIENCE, _LITTLE_PATIENCE = 2.0, 0.1
# Number of files to read at a time, and bytes that may be queued for writing before the next text.
READERS, _MOST_QUEUED = min(os.cpu_count() or 1, 8), 1 << 30

_T = TypeVar("_T")


class StoreUsage(NamedTuple):
    """Contents of a store, and statistics of this process.

    Attributes:
        files: Number of pages in the folder, from all models and processes.
        bytes: Their total size, in bytes.
        hits: Number of prompts whose beginning was found.
        misses: Number of prompts whose beginning was not found.
        tokens_found: Number of tokens that were found, over all sequences.
        bytes_read: Bytes read from files.
        bytes_written: Bytes written to files.
        files_refused: Number of damaged or foreign files that were rejected.
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
    """A folder of prefix pages that outlives the process.

    ```python
    store = PrefixStore("~/.cache/prefixes", max_bytes=8 << 30)
    enable(model, prefix_store=store)
    ```

    Several processes may share the folder. A file that is damaged, or does not match its name, is
    ignored with a warning and removed. If a write fails (full disk, no permission), nothing is
    stored from then on, which is logged once. Reading continues.

    Args:
        path: The folder. It is created if it does not exist. "~" is the home folder.
        max_bytes: Maximum total size of the files, in bytes. The least recently used are evicted
            first.

    Raises:
        ConfigError: The folder cannot be created, or `max_bytes` is below 1.
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
                f"path: expected a folder that exists or can be created, got {str(path)!r}: "
                f"{error}; choose a different path"
            ) from error
        self._folder = PrefixFolder(self.path, _NAMES, max_bytes)
        self._counts = dict.fromkeys(StoreUsage._fields[2:], 0)
        self._refused: set[str] = set()
        self._begin()
        _STORES.add(self)
        self._writes, self._is_bounded, self._patience = True, False, _PATIENCE

    def _begin(self) -> None:
        """Initialize the state without a thread and without queued pages."""
        self._mutex = threading.Lock()
        # The writer thread, which the interpreter joins at exit, and the pages to write.
        self._writer = ThreadPoolExecutor(1, "hf_fp8kv prefix store")
        self._queued: dict[str, Page] = {}

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), max_bytes=self.max_bytes), (str(self.path),)

    def usage(self) -> StoreUsage:
        """Return the contents of the folder, and statistics of this process, after `flush`."""
        self.flush()
        files = self._folder.files()
        return StoreUsage(len(files), sum(file.bytes for file in files), **self.counts())

    def counts(self) -> dict[str, int]:
        """Return the statistics of this process, as in `usage`, without reading the folder."""
        with self._mutex:
            return dict(self._counts)

    def count(self, **numbers: int) -> None:
        """Add to the statistics of `usage`."""
        with self._mutex:
            for name, number in numbers.items():
                self._counts[name] += number

    # -- reading -----------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether there is a page for a key. Its file may still be damaged."""
        is_there = key in self._queued or os.path.lexists(self._file(key))
        return is_there and key not in self._refused

    def read(self, keys: Iterable[str], check: Callable[[Page], None]) -> Iterator[Page]:
        """Yield the pages for keys, up to the first page that is missing or damaged.

        Threads read at most `READERS` pages ahead. Errors of files are not raised. `check` must
        raise ValueError, or any error that bad data cause, for a page that cannot be used.
        """
        if not self._is_bounded:
            self._is_bounded = True
            with suppress(OSError, ImportError):
                self._folder.hold_bound()
        keys = iter(keys)
        with ThreadPoolExecutor(READERS) as pool:

            def start(count: int) -> list[tuple[str, Future[Page]]]:
                return [
                    (key, _start(pool, partial(self._load, key))) for key in islice(keys, count)
                ]

            ahead = deque(start(1))  # one first, because often there is none
            while ahead:
                key, loaded = ahead.popleft()
                try:
                    check(page := loaded.result())
                except FileNotFoundError:
                    return
                except Exception as error:  # a file may hold anything
                    self.refuse(key, error)
                    return
                ahead += start(READERS - len(ahead))
                yield page

    def _load(self, key: str) -> Page:
        """Read a page. Raises OSError or ValueError."""
        if key in self._refused:
            raise FileNotFoundError(key)
        if (queued := self._queued.get(key)) is not None:
            return queued
        data = self._folder.read(self._file(key).name)
        self.count(bytes_read=len(data))
        return unpack(key, data)

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"

    def refuse(self, key: str, error: Exception) -> None:
        """Ignore a file from now on, with a warning. Remove it if it is bad, if possible."""
        self._refused.add(key)
        self.count(files_refused=1)
        number = getattr(error, "errno", None)
        if isinstance(error, OSError | MemoryError) and number != errno.ELOOP:  # not a link
            # The file may be intact: too many files may be open, or another user owns it.
            why = type(error).__name__ if number is None else os.strerror(number)
            warn_once(logger, f"{self}: pages that cannot be read ({why}) are ignored")
            return
        logger.warning(
            "prefix store: %s is not a page that this library wrote (%s: %s); it is ignored, and "
            "removed if possible",
            self._file(key), type(error).__name__, error,
        )  # fmt: skip
        with suppress(OSError):  # a folder, or not removable
            self._file(key).unlink(missing_ok=True)  # another process may be faster
            self._refused.discard(key)

    # -- writing -----------------------------------------------------------------------------

    def write(
        self, keys: Sequence[str], make: Callable[[list[int]], Iterable[Page]], first: int = 0
    ) -> None:
        """Store the missing pages of a text in a background thread.

        Errors of the disk, or lack of memory for copies, are not raised.

        Args:
            keys: Keys of all pages of the text, from the first token on.
            make: Function that returns the pages at these indices. Their tensors must not change.
            first: First index that `make` supports. If the page before it is not stored, later
                pages are useless and are not stored.
        """
        missing = []
        for index in range(max(first - 1, 0), len(keys)):
            if self.has(keys[index]):
                continue
            if index < first or keys[index] in self._refused:
                keys = keys[:index]
                break
            missing.append(index)
        if not missing or not self._writes:
            return
        queued = (row for page in list(self._queued.values()) for row in page.rows)
        if sum(map(len, queued)) > _MOST_QUEUED:
            self.flush()
        try:
            pages = dict(zip((keys[index] for index in missing), make(missing), strict=True))
        except (MemoryError, torch.OutOfMemoryError):
            warn_once(logger, _NO_MEMORY.format(self))
            return
        self._queued.update(pages)
        _start(self._writer, partial(self._write_text, keys, pages))

    def touch(self, keys: Sequence[str]) -> None:
        """Mark the pages of a text as used, the first pages as the most recent."""

        def date(now: int = time.time_ns()) -> None:
            for index, key in enumerate(keys):
                self._folder.touch(self._file(key).name, now - index)

        if self._queued:  # these pages may be among the pending pages
            _start(self._writer, date)
        else:
            date()

    def flush(self) -> None:
        """Wait until all pending pages are in the folder."""
        _start(self._writer, lambda: None).result()  # after all other jobs

    def _write_text(self, keys: Sequence[str], pages: dict[str, Page]) -> None:
        names = {self._file(key).name for key in keys}
        try:
            with self._folder.lock(self._patience) as lock:
                # A process that holds the lock this long may be suspended: wait less from now on.
                self._patience = _PATIENCE if lock is not None else _LITTLE_PATIENCE
                for key, page in pages.items():
                    if lock is None or not self._writes:
                        break
                    file = self._file(key)
                    if os.path.lexists(file):
                        continue  # another process was faster
                    data = pack(key, page)
                    if not self._folder.put(lock, file.name, data, names):
                        break  # the text fills the whole store, but its beginning is stored
                    self.count(bytes_written=len(data))
        except MemoryError:
            warn_once(logger, _NO_MEMORY.format(self))
        except (OSError, ImportError) as error:
            self._writes = False
            warn_once(
                logger,
                f"{self} stores nothing from now on ({type(error).__name__}: {error}); existing "
                "pages are still read",
            )
        except Exception:
            logger.exception("%s: the pages of a text are not stored", self)
        finally:
            # Together, because pages of a text may share memory, which the last page frees.
            for key in pages:
                self._queued.pop(key, None)
            pages.clear()  # a job without a thread would stay in the queue


def _start(pool: ThreadPoolExecutor, job: Callable[[], _T]) -> Future[_T]:
    """Run a job in the pool, or immediately if it cannot start a thread."""
    with suppress(RuntimeError):  # no more threads are possible, or the main thread has ended
        return pool.submit(job)
    done = Future[_T]()
    try:
        done.set_result(job())
    except Exception as error:
        done.set_exception(error)
    return done


_STORES: WeakSet[PrefixStore] = WeakSet()
if hasattr(os, "register_at_fork"):  # not on Windows
    # A forked process does not inherit the thread. Pending writes stay with the parent.
    os.register_at_fork(after_in_child=lambda: list(map(PrefixStore._begin, _STORES)))
