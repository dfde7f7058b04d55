"""`PrefixStore`: pages of prefixes in a folder, for this process and others, now and later.

A file holds one page of tokens, of all layers. Its name is a hash of these tokens, of all tokens
before them, and of everything else that its numbers depend on: whoever looks for a name finds the
right numbers, or nothing. The folder is the index: a file is in it from the moment when it is
renamed to its name, whole, until it is removed.

Files are read in one go, and not mapped: what is used is then what was checked, and a file that
somebody cuts off meanwhile is an error, where a map would end the process.
"""

import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
# Seconds to wait for other processes that are writing, and for those that have written for so long.
_PATIENCE, _LITTLE_PATIENCE = 2.0, 0.1
# Files that are read at a time, and bytes that may wait to be written beside those of one text.
READERS, _MOST_QUEUED = min(os.cpu_count() or 1, 8), 1 << 30

_T = TypeVar("_T")


class StoreUsage(NamedTuple):
    """What a store holds, and what this process had of it.

    Attributes:
        files: pages in the folder now, of all models and processes.
        bytes: their size.
        hits: texts that found a beginning here.
        misses: texts that did not.
        tokens_found: tokens of hits, over all sequences.
        bytes_read: of files.
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
        self._folder = PrefixFolder(self.path, _NAMES, max_bytes)
        self._counts = dict.fromkeys(StoreUsage._fields[2:], 0)
        self._refused: set[str] = set()
        self._begin()
        _STORES.add(self)
        self._writes, self._is_bounded, self._patience = True, False, _PATIENCE

    def _begin(self) -> None:
        """Begin without a thread and without anything to write."""
        self._mutex = threading.Lock()
        # A thread, which a process that ends waits for, its jobs, and the pages that these write.
        self._writer = ThreadPoolExecutor(1, "hf_fp8kv prefix store")
        self._jobs: set[Future[None]] = set()
        self._queued: dict[str, Page] = {}

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), max_bytes=self.max_bytes), (str(self.path),)

    def usage(self) -> StoreUsage:
        """Return what the folder holds now, and what this process had of it; see `flush`."""
        self.flush()
        files = self._folder.files()
        return StoreUsage(len(files), sum(file.bytes for file in files), **self.counts())

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
        is_there = key in self._queued or os.path.lexists(self._file(key))
        return is_there and key not in self._refused

    def read(self, keys: Iterable[str], check: Callable[[Page], None]) -> Iterator[Page]:
        """Yield the pages under keys, up to the first that is not there, or not whole.

        Several are read at a time, by threads, and at most `READERS` ahead of what is taken.
        Raises nothing of its own.

        `check`: raises ValueError, or what bad data makes it raise, for a page that cannot be used.
        """
        if not self._is_bounded:
            self._is_bounded = True
            with suppress(OSError, ImportError):
                self._folder.hold_bound()
        keys = iter(keys)
        with ThreadPoolExecutor(READERS) as pool:

            def start(most: int) -> list[tuple[str, Future[Page]]]:
                return [(key, _start(pool, partial(self._load, key))) for key in islice(keys, most)]

            ahead = deque(start(1))  # alone: a store often has none
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
        """Return a page. Raises OSError or ValueError."""
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
        """Ignore a file from now on, with a warning, and remove it if it is bad and can be."""
        self._refused.add(key)
        self.count(files_refused=1)
        number = getattr(error, "errno", None)
        if isinstance(error, OSError | MemoryError) and number != errno.ELOOP:  # not a link
            # The file may be good: too many files are open, or another user owns it.
            why = type(error).__name__ if number is None else os.strerror(number)
            warn_once(logger, f"{self}: pages that cannot be read ({why}) are ignored")
            return
        logger.warning(
            "prefix store: %s is not a page that this library wrote (%s: %s); it is ignored, and "
            "removed if possible",
            self._file(key), type(error).__name__, error,
        )  # fmt: skip
        with suppress(OSError):  # a folder, or not ours to remove
            self._file(key).unlink(missing_ok=True)  # another process may be faster
            self._refused.discard(key)

    # -- writing -----------------------------------------------------------------------------

    def write(
        self, keys: Sequence[str], make: Callable[[list[int]], Iterable[Page]], first: int = 0
    ) -> None:
        """Have the pages of a text stored that are not there yet, by a thread.

        Raises nothing that a disk causes, or memory that has no room for a copy of them.

        Args:
            keys: of all its pages, from the first token on.
            make: returns the pages at these places, of which nobody changes the tensors.
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
        if not missing or not self._writes:
            return
        queued = (row for page in list(self._queued.values()) for row in page.rows)
        if sum(map(len, queued)) > _MOST_QUEUED:
            self.flush()
        try:
            pages = dict(zip((keys[at] for at in missing), make(missing), strict=True))
        except (MemoryError, torch.OutOfMemoryError):
            warn_once(logger, _NO_MEMORY.format(self))
            return
        self._queued.update(pages)
        self._submit(partial(self._write_text, keys, pages))

    def touch(self, keys: Sequence[str]) -> None:
        """Note that the pages of a text were used: the first ones the most recently."""

        def date(now: int = time.time_ns()) -> None:
            for at, key in enumerate(keys):
                self._folder.touch(self._file(key).name, now - at)

        # After what is being written, which may be these very pages.
        if self._jobs:
            self._submit(date)
        else:
            date()

    def flush(self) -> None:
        """Wait until what was to be stored is in the folder."""
        wait(self._jobs.copy())

    def _submit(self, job: Callable[[], None]) -> None:
        future = _start(self._writer, job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)

    def _write_text(self, keys: Sequence[str], pages: dict[str, Page]) -> None:
        own = {self._file(key).name for key in keys}
        try:
            with self._folder.lock(self._patience) as lock:
                # Who writes for so long may have been stopped: not to be waited for each time.
                self._patience = _PATIENCE if lock is not None else _LITTLE_PATIENCE
                for key, page in pages.items():
                    if lock is None or not self._writes:
                        break
                    file = self._file(key)
                    if os.path.lexists(file):
                        continue  # another process was faster
                    data = pack(key, page)
                    if not self._folder.put(lock, file.name, data, own):
                        break  # the text alone takes all there is: its beginning is stored
                    self.count(bytes_written=len(data))
        except MemoryError:
            warn_once(logger, _NO_MEMORY.format(self))
        except (OSError, ImportError) as error:
            self._writes = False
            warn_once(
                logger,
                f"{self} stores nothing from now on ({type(error).__name__}: {error}); what it "
                "holds is still read",
            )
        except Exception:
            logger.exception("%s: the pages of a text are not stored", self)
        finally:
            # All at once: pages of a text may share memory, which is free when none is left.
            for key in pages:
                self._queued.pop(key, None)
            pages.clear()  # a job that no thread could be started for stays in the queue


def _start(pool: ThreadPoolExecutor, job: Callable[[], _T]) -> Future[_T]:
    """Have a job done by a thread, or at once if there can be none."""
    with suppress(RuntimeError):  # no more threads, or the main thread has ended
        return pool.submit(job)
    done = Future[_T]()
    try:
        done.set_result(job())
    except Exception as error:
        done.set_exception(error)
    return done


_STORES: WeakSet[PrefixStore] = WeakSet()
if hasattr(os, "register_at_fork"):  # not on Windows
    # A forked process has no thread, and leaves what was being written to the one that has it.
    os.register_at_fork(after_in_child=lambda: list(map(PrefixStore._begin, _STORES)))
