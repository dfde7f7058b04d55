"""`PrefixStore`: pages of prefixes in a folder, for this process and others, now and later.

A file holds one page of tokens, of all layers. Its name is a hash of these tokens, of all tokens
before them, and of everything else that its numbers depend on: whoever looks for a name finds the
right numbers, or nothing. The folder is the index: a file is in it from the moment when it is
renamed to its name, whole, until it is removed.

Files are read in one go, and not mapped: what is used is then what was checked, and a file that
somebody cuts off meanwhile is an error, where a map would end the process.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from ..errors import ConfigError
from ..utils.warn_once import warn_once
from .prefix_file import Page, pack, read_file, unpack
from .prefix_folder import PrefixFolder

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_NAMES = re.compile(rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}")
DEFAULT_BYTES = 16 << 30
# Seconds to wait for other processes that are writing.
_PATIENCE = 2.0


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
        self._folder = PrefixFolder(self.path, _NAMES, max_bytes)
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
        try:
            files = self._folder.files()
        except OSError:
            files = []
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
        return key not in self._refused and os.path.lexists(self._file(key))

    def read(self, key: str, check: Callable[[Page], None]) -> Page | None:
        """Return the page under a key; None if there is none that is whole. Raises nothing.

        `check`: raises ValueError, or what bad data makes it raise, for a page that cannot be used.
        """
        if not self._is_bounded:
            self._is_bounded = True
            with suppress(OSError, ImportError):
                self._folder.hold_bound()
        if key in self._refused:
            return None
        try:
            data = read_file(self._file(key), self.max_bytes)
            page = unpack(key, data)
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
                self._folder.touch(_file_name(key), now - at)
            except (OSError, NotImplementedError):
                continue  # removed by another process, not ours to touch, or on Windows

    def _file(self, key: str) -> Path:
        return self.path / _file_name(key)

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
                with self._folder.lock(self._patience) as lock:
                    # Who writes for so long may have been stopped: not to be waited for each time.
                    self._patience = _PATIENCE if lock is not None else 0.0
                    if lock is not None:
                        self._write(lock, keys, missing, pages)
            except (OSError, ImportError) as error:
                self._writes = False
                warn_once(
                    logger,
                    f"{self} stores nothing from now on ({type(error).__name__}: {error}); what it "
                    "holds is still read",
                )

    def _write(
        self, lock: int, keys: Sequence[str], missing: list[int], pages: Iterable[Page]
    ) -> None:
        own = {_file_name(key) for key in keys}
        for at, page in zip(missing, pages, strict=True):
            if self.has(keys[at]):
                continue  # another process was faster
            data = pack(keys[at], page)
            if not self._folder.put(lock, _file_name(keys[at]), data, own):
                return  # the text alone takes all there is: its beginning is stored
            self.count(bytes_written=len(data))


def _file_name(key: str) -> str:
    return f"{key}{_SUFFIX}"
