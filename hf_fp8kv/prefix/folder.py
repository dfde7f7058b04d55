"""A folder of files that take a bounded number of bytes, shared by processes.

One process at a time writes, the one that holds the lock. The lock file holds an upper bound of the
bytes: it is raised before a file is written and lowered after files were removed, so a process that
is killed leaves it too high, and never too low. A look at the whole folder corrects it: a process
takes one when it begins, and while it removes files, once all that it saw the last time have been
removed or used since.
"""

import heapq
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_LOCK, _PARTIAL = ".prefix_store.lock", ".part"
# A link leads out of the folder, and a pipe would never answer. (Windows has none of these.)
_OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
# Nanoseconds that the time of a file may be behind the clock: a tick of the kernel, and a margin.
_TICK = 20_000_000


class StoredFile(NamedTuple):
    """A file of the folder: when it was last used (ns since 1970), its bytes, its name."""

    used: int
    bytes: int
    name: str


class PrefixFolder:
    """The files of a folder whose names match a pattern; together at most `max_bytes`.

    `names`: matches the whole name of a file. Other files are left alone.
    """

    def __init__(self, path: Path, names: re.Pattern[str], max_bytes: int) -> None:
        self.path, self._names, self._max_bytes = path, names, max_bytes
        self._unfinished = re.compile(rf"\.{names.pattern}{re.escape(_PARTIAL)}")
        # A heap of the files at the last look, and the time of it: what is not in it was used
        # later. Each file is looked up again before it is removed.
        self._oldest: list[StoredFile] = []
        self._looked = 0

    def files(self) -> list[StoredFile]:
        """Return all files; none if the folder cannot be read."""
        found = []
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                if self._names.fullmatch(entry.name) and (file := self._look_up(entry.name)):
                    found.append(file)
        return found

    def _look_up(self, name: str) -> StoredFile | None:
        with suppress(OSError):  # another process was faster
            found = (self.path / name).lstat()
            if not stat.S_ISDIR(found.st_mode):
                return StoredFile(found.st_mtime_ns, found.st_size, name)
        return None

    def read(self, name: str) -> bytes:
        """Return the bytes of a regular file. Raises OSError, for a link ELOOP, or ValueError."""
        path, opener = self.path / name, lambda path, flags: os.open(path, flags | _OPEN_FLAGS)
        with open(path, "rb", opener=opener) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > self._max_bytes:
                raise ValueError("not a file, or larger than the whole store may be")
            return file.read(found.st_size)

    def touch(self, name: str, used: int) -> None:
        """Note when a file was used, in ns since 1970, if it is there and ours."""
        with suppress(OSError, NotImplementedError):  # the latter on Windows
            os.utime(self.path / name, ns=(used, used), follow_symlinks=False)

    def hold_bound(self) -> None:
        """Remove what is over the bound, which may have been larger; nothing while others write."""
        with self.lock(0.0) as lock:
            if lock is not None:
                _write_total(lock, self._evict(lock, self._count(lock), self._max_bytes, ()))

    def put(self, lock: int, name: str, data: bytes, own: Collection[str]) -> bool:
        """Write a file that is not there yet, whole or not at all; return whether there is room.

        The least recently used files make room, except for `own`, names of files that are used now.
        Raises OSError: a full disk, or one that cannot be written.
        """
        if (size := len(data)) > self._max_bytes:
            return False
        if (total := _read_total(lock)) is None:
            total = self._count(lock)
        total = self._evict(lock, total, self._max_bytes - size, own)
        has_room = total + size <= self._max_bytes
        _write_total(lock, total + size if has_room else total)
        if not has_room:
            return False
        unfinished = self.path / f".{name}{_PARTIAL}"
        with suppress(OSError):
            unfinished.unlink()  # of a process that is gone: the lock is ours
        try:
            with unfinished.open("xb") as file:  # not through a link
                file.write(data)
            os.replace(unfinished, self.path / name)
        except FileExistsError:
            raise  # not ours to remove
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return True

    def _evict(self, lock: int, total: int, most: int, own: Collection[str]) -> int:
        """Remove the least recently used files, except `own`, until `most` bytes are left.

        `total` bytes are there before. Return how many are left.
        """
        is_new = False
        while total > most:
            if not is_new and (not self._oldest or self._oldest[0].used >= self._looked):
                total, is_new = self._count(lock), True
                continue
            if not self._oldest:
                break
            file = heapq.heappop(self._oldest)
            if file.name in own:
                continue  # used now, so it is as good as written later
            if (now := self._look_up(file.name)) != file:
                if now is not None:
                    heapq.heappush(self._oldest, now)
            else:
                (self.path / file.name).unlink(missing_ok=True)
                total -= file.bytes
        return total

    def _count(self, lock: int) -> int:
        """Look at all files, remove what killed processes left unfinished, and return the bytes."""
        for name in os.listdir(self.path):
            if self._unfinished.fullmatch(name):
                with suppress(OSError):  # somebody's folder, or not ours to remove
                    (self.path / name).unlink()
        self._looked = time.time_ns() - _TICK
        self._oldest = self.files()
        now = time.time_ns()
        for file in self._oldest:
            if file.used > now:  # a clock was set back: new files would go before these
                self.touch(file.name, self._looked)
        heapq.heapify(self._oldest)
        # Not known until the caller writes it: a full disk may have no room before files are gone.
        os.ftruncate(lock, 0)
        return sum(file.bytes for file in self._oldest)

    @contextmanager
    def lock(self, patience: float) -> Iterator[int | None]:
        """Hold the folder's lock, which a killed process gives back; None: others are writing.

        `patience`: seconds to wait for them. Raises OSError, or ImportError on Windows.
        """
        import fcntl  # not on Windows

        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o666)
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
            yield handle if is_ours else None
        finally:
            if is_ours:
                # A process that was forked meanwhile has the handle, too.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _read_total(lock: int) -> int | None:
    """Return the number in the lock file, of 20 digits; None if there is something else in it."""
    data = os.pread(lock, 21, 0)
    return int(data) if len(data) == 20 and data.isdigit() else None


def _write_total(lock: int, total: int) -> None:
    os.pwrite(lock, b"%020d" % total, 0)
