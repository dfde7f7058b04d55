"""`PrefixStore`: pages of prefixes in a folder, shared between processes and kept across runs.

A file holds one page of tokens, for all layers. The file's name is a hash of these tokens, all
tokens before them, and everything else that the page depends on. A lookup therefore finds the right
page or nothing. The folder is the index: a complete file becomes visible when it is renamed, and
remains until it is removed.

Files are read completely instead of mapped, so that the bytes that are checked are also used. If a
file is truncated in between, reading raises an error, whereas a mapping would end the process.
"""

import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from ..errors import ConfigError
from ..utils.arguments import check_count
from ..utils.files import read_regular_file
from ..utils.warn_once import warn_once
from .file import StoredPage, parse_page, serialize_page
from .folder import PrefixFolder

logger = logging.getLogger(__name__)

_NO_MEMORY_MESSAGE = "{}: no memory for a copy of pages, which are not stored"
DEFAULT_MAX_BYTES = 16 << 30
# Time to wait for other processes that write, and the shorter time after a wait has timed out.
_LOCK_SECONDS = 2.0
_SHORT_LOCK_SECONDS = 0.1
# Number of files to read at a time, and bytes in the queue above which `write` waits for the queue
# to empty.
NUM_READERS = min(os.cpu_count() or 1, 8)
_MAX_QUEUED_BYTES = 1 << 30

_T = TypeVar("_T")


class StoreUsage(NamedTuple):
    """Contents of a store, and statistics of this process.

    Attributes:
        files: Number of pages in the folder, from all models and processes.
        bytes: Total size of these pages, in bytes.
        hits: Number of prompts whose beginning was found.
        misses: Number of prompts whose beginning was not found.
        tokens_found: Number of tokens that were found, over all sequences.
        bytes_read: Bytes read from files.
        bytes_written: Bytes written to files.
        files_refused: Number of damaged or foreign files that were refused.
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
    """A folder of pages of prefixes, which outlives the process.

    ```python
    store = PrefixStore("~/.cache/prefixes", max_bytes=8 << 30)
    enable(model, prefix_store=store)
    ```

    Several processes may share the folder. A file that is damaged, or does not match its name, is
    ignored with a warning, and removed. If a write fails (full disk, no permission), a message is
    logged once, and nothing more is stored. Reading continues.

    The folder `plans` has the first plan of each model, which later processes use. These files do
    not count towards `max_bytes`.

    Args:
        path: The folder. It is created if it does not exist. "~" is the home folder.
        max_bytes: Maximum total size of the files, in bytes. The least recently used files are
            evicted first.

    Raises:
        ConfigError: The folder cannot be created, or `max_bytes` is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        check_count("max_bytes", max_bytes)
        self.max_bytes = max_bytes
        try:
            self.path = Path(path).expanduser().absolute()
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"path: expected a folder that exists or can be created, got {str(path)!r}: "
                f"{error}. Choose another path"
            ) from error
        self._folder = PrefixFolder(self.path, max_bytes)
        self._counts = Counter(dict.fromkeys(StoreUsage._fields[2:], 0))
        self._refused_keys: set[str] = set()
        self._reset_writer()
        _STORES.add(self)
        self._can_write = True
        self._has_applied_limit = False
        self._lock_timeout = _LOCK_SECONDS

    def _reset_writer(self) -> None:
        """Initialize the state without a thread and without queued pages."""
        self._mutex = threading.Lock()
        # The writer thread, which the interpreter joins at exit, and the pages to write.
        self._writer = ThreadPoolExecutor(1, "hf_fp8kv prefix store")
        self._queue: dict[str, StoredPage] = {}

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), max_bytes=self.max_bytes), (str(self.path),)

    def usage(self) -> StoreUsage:
        """Return the contents of the folder, and statistics of this process, after `flush`."""
        self.flush()
        files = self._folder.list_files()
        return StoreUsage(len(files), sum(file.num_bytes for file in files), **self.counts())

    def counts(self) -> dict[str, int]:
        """Return the statistics of this process, as in `usage`, without reading the folder."""
        with self._mutex:
            return dict(self._counts)

    def add_counts(self, **increments: int) -> None:
        """Add increments to the statistics of `usage`, by name."""
        with self._mutex:
            self._counts.update(increments)

    def lock(self) -> AbstractContextManager[int | None]:
        """Hold the lock of the folder in a `with` block, or yield None if another process writes.

        Raises:
            OSError, ImportError: The folder cannot be locked.
        """
        return self._folder.lock(_LOCK_SECONDS)

    # -- reading -----------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether the store has a page for a key. The file may still be damaged."""
        exists = key in self._queue or os.path.lexists(self._get_path(key))
        return exists and key not in self._refused_keys

    def read(
        self, keys: Iterable[str], check: Callable[[StoredPage], None]
    ) -> Iterator[StoredPage]:
        """Yield the pages for keys, up to the first page that is missing or damaged.

        Threads read at most `NUM_READERS` pages in advance. Errors of files are not raised. `check`
        must raise an error, such as ValueError, for a page that cannot be used.
        """
        if not self._has_applied_limit:
            self._has_applied_limit = True
            with suppress(OSError, ImportError):
                self._folder.apply_limit()
        keys = iter(keys)
        with ThreadPoolExecutor(NUM_READERS) as executor:

            def submit_reads(num_reads: int) -> list[tuple[str, Future[StoredPage]]]:
                return [
                    (key, _submit(executor, partial(self._load_page, key)))
                    for key in islice(keys, num_reads)
                ]

            pending_reads = deque(submit_reads(1))  # only one page, because often no page is stored
            while pending_reads:
                key, future = pending_reads.popleft()
                try:
                    page = future.result()
                    check(page)
                except FileNotFoundError:
                    return
                except Exception as error:  # a file may have any contents
                    self.refuse(key, error)
                    return
                pending_reads += submit_reads(NUM_READERS - len(pending_reads))
                yield page

    def _load_page(self, key: str) -> StoredPage:
        """Return the page for a key. Raise OSError or ValueError if it cannot be read."""
        if key in self._refused_keys:
            raise FileNotFoundError(key)
        if (page := self._queue.get(key)) is not None:
            return page
        contents = read_regular_file(self._get_path(key), self.max_bytes)
        self.add_counts(bytes_read=len(contents))
        return parse_page(key, contents)

    def _get_path(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"

    def refuse(self, key: str, error: Exception) -> None:
        """Ignore the file of a key, with a warning. Remove the file if it is damaged."""
        self._refused_keys.add(key)
        self.add_counts(files_refused=1)
        error_number = getattr(error, "errno", None)
        # ELOOP means that the file is a symbolic link, which this library never writes.
        if isinstance(error, OSError | MemoryError) and error_number != errno.ELOOP:
            # The file may be intact: too many files may be open, or the file is another user's.
            reason = type(error).__name__ if error_number is None else os.strerror(error_number)
            warn_once(f"{self}: pages that cannot be read ({reason}) are ignored")
            return
        logger.warning(
            "prefix store: %s is not a page that this library wrote (%s: %s). It is ignored, and "
            "removed if possible",
            self._get_path(key),
            type(error).__name__,
            error,
        )
        with suppress(OSError):  # a folder, or not removable
            self._get_path(key).unlink(missing_ok=True)  # another process may be faster
            self._refused_keys.discard(key)

    # -- writing -----------------------------------------------------------------------------

    def write(
        self,
        keys: Sequence[str],
        make_pages: Callable[[list[int]], Iterable[StoredPage]],
        first_index: int = 0,
    ) -> None:
        """Store the missing pages of a prompt in a background thread.

        Errors of the disk, and a lack of memory for copies, are not raised.

        Args:
            keys: Keys of all pages of the prompt, from the first token on.
            make_pages: Function from indices to pages. The tensors of the pages must not change.
            first_index: First index that `make_pages` supports. If the page before it is not
                stored, later pages would not be found and are not stored.
        """
        missing_indices = []
        for index in range(max(first_index - 1, 0), len(keys)):
            if self.has(keys[index]):
                continue
            if index < first_index or keys[index] in self._refused_keys:
                keys = keys[:index]
                break
            missing_indices.append(index)
        if not missing_indices or not self._can_write:
            return
        queued_pages = list(self._queue.values())  # a copy, because the writer removes pages
        if sum(len(row) for page in queued_pages for row in page.rows) > _MAX_QUEUED_BYTES:
            self.flush()
        missing_keys = [keys[index] for index in missing_indices]
        try:
            pages = dict(zip(missing_keys, make_pages(missing_indices), strict=True))
        except (MemoryError, torch.OutOfMemoryError):
            warn_once(_NO_MEMORY_MESSAGE.format(self))
            return
        self._queue.update(pages)
        _submit(self._writer, partial(self._write_pages, keys, pages))

    def touch(self, keys: Sequence[str]) -> None:
        """Mark the pages of a prompt as used now. The first page becomes the most recent one."""
        now = time.time_ns()

        def set_times() -> None:
            for index, key in enumerate(keys):
                self._folder.touch(self._get_path(key).name, now - index)

        _submit(self._writer, set_times)  # after queued pages of the prompt

    def flush(self) -> None:
        """Wait until all pending pages are in the folder."""
        _submit(self._writer, lambda: None).result()  # this job runs after all queued jobs

    def _write_pages(self, keys: Sequence[str], pages: dict[str, StoredPage]) -> None:
        file_names = {self._get_path(key).name for key in keys}
        try:
            with self._folder.lock(self._lock_timeout) as lock_fd:
                # A process that holds the lock this long may be suspended, so wait less next time.
                self._lock_timeout = _LOCK_SECONDS if lock_fd is not None else _SHORT_LOCK_SECONDS
                for key, page in pages.items():
                    if lock_fd is None or not self._can_write:
                        break
                    path = self._get_path(key)
                    if os.path.lexists(path):
                        continue  # another process has written the page
                    contents = serialize_page(key, page)
                    if not self._folder.put(lock_fd, path.name, contents, file_names):
                        break  # the prompt fills the store, but its beginning is stored
                    self.add_counts(bytes_written=len(contents))
        except MemoryError:
            warn_once(_NO_MEMORY_MESSAGE.format(self))
        except (OSError, ImportError) as error:
            self._can_write = False
            warn_once(
                f"{self} stores nothing more ({type(error).__name__}: {error}). Existing "
                "pages are still read"
            )
        except Exception:
            logger.exception("%s: the pages of a prompt are not stored", self)
        finally:
            # Remove the pages together. They may share memory, which is freed with the last page.
            for key in pages:
                self._queue.pop(key, None)
            pages.clear()  # without a thread, the executor keeps this job in its queue


def _submit(executor: ThreadPoolExecutor, job: Callable[[], _T]) -> Future[_T]:
    """Run a job in the executor, or immediately if it cannot start a thread."""
    with suppress(RuntimeError):  # no more threads are possible, or the main thread has ended
        return executor.submit(job)
    future = Future[_T]()
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
    return future


_STORES: WeakSet[PrefixStore] = WeakSet()


def flush_stores() -> None:
    """Wait until all pending pages of this process's stores are in their folders."""
    for store in list(_STORES):
        store.flush()


def _reset_writers() -> None:
    for store in _STORES:
        store._reset_writer()


if hasattr(os, "register_at_fork"):  # not on Windows
    # A forked process does not inherit the thread. Pending writes stay with the parent.
    os.register_at_fork(after_in_child=_reset_writers)
