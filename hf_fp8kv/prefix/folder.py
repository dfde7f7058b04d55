"""A folder of files with a limit on their total size, shared by processes.

Only the process that holds the lock writes. The lock file contains an upper bound on the total
size. The bound is raised before a file is written, and lowered after files are removed, so a killed
process can leave it too high, but never too low. A scan of the folder corrects the bound. A process
scans when it begins, and during eviction when all files of its last scan have been removed or used.
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

from ..utils.files import SAFE_OPEN_FLAGS, write_atomically

_LOCK_NAME = ".prefix_store.lock"
_NAME_PATTERN = re.compile(r"[0-9a-f]{64}\.safetensors")
# The names of the files of `write_atomically`, until they are complete.
_PARTIAL_PATTERN = re.compile(rf"\.{_NAME_PATTERN.pattern}\.[0-9a-f-]+\.part")
# Nanoseconds that a file's time may lag behind the clock: one kernel tick, plus a margin.
_MAX_CLOCK_LAG_NS = 20_000_000


class StoredFile(NamedTuple):
    """A stored page's file in the folder."""

    last_use_ns: int  # time of the last use, since 1970
    num_bytes: int
    name: str


class PrefixFolder:
    """The stored pages of a folder, with at most `max_bytes` in total. Other files are ignored."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        # A heap of the files at the last scan. A file that is not in the heap was used later than
        # `_unused_before`. A file is checked again before it is removed.
        self._scanned_files: list[StoredFile] = []
        # A time shortly before the last scan. Files with a later time may have been used after it.
        self._unused_before = 0

    def list_files(self) -> list[StoredFile]:
        """Return all files, or an empty list if the folder cannot be read."""
        files = []
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                if _NAME_PATTERN.fullmatch(entry.name) and (file := self._find_file(entry.name)):
                    files.append(file)
        return files

    def _find_file(self, name: str) -> StoredFile | None:
        with suppress(OSError):  # another process has removed the file
            status = (self.path / name).lstat()
            if not stat.S_ISDIR(status.st_mode):
                return StoredFile(status.st_mtime_ns, status.st_size, name)
        return None

    def touch(self, name: str, last_use_ns: int) -> None:
        """Set a file's last use, in ns since 1970, if the file exists and belongs to this user."""
        with suppress(OSError, NotImplementedError):  # NotImplementedError on Windows
            os.utime(self.path / name, ns=(last_use_ns, last_use_ns), follow_symlinks=False)

    def apply_limit(self) -> None:
        """Evict files until a possibly changed limit holds, unless another process is writing."""
        with self.lock(0.0) as lock_fd:
            if lock_fd is not None:
                total_bytes = self._evict(lock_fd, self._scan(lock_fd), self._max_bytes, ())
                _write_total(lock_fd, total_bytes)

    def put(self, lock_fd: int, name: str, contents: bytes, kept_names: Collection[str]) -> bool:
        """Atomically write a new file, and return whether there was room.

        The least recently used files are evicted, except those named in `kept_names`. Raise
        OSError if the disk is full or cannot be written.
        """
        if (num_bytes := len(contents)) > self._max_bytes:
            return False
        if (total_bytes := _read_total(lock_fd)) is None:
            total_bytes = self._scan(lock_fd)
        total_bytes = self._evict(lock_fd, total_bytes, self._max_bytes - num_bytes, kept_names)
        has_room = total_bytes + num_bytes <= self._max_bytes
        _write_total(lock_fd, total_bytes + num_bytes if has_room else total_bytes)
        if not has_room:
            return False
        # After a loss of power, the digest detects a file that is not complete.
        write_atomically({self.path / name: contents}, is_synced=False)
        return True

    def _evict(
        self, lock_fd: int, total_bytes: int, max_bytes: int, kept_names: Collection[str]
    ) -> int:
        """Remove the least recently used files until the remaining files total at most `max_bytes`.

        Files in `kept_names` stay. `total_bytes` is the size of all files. Return the new size.
        """
        has_scanned = False
        while total_bytes > max_bytes:
            is_outdated = (
                not self._scanned_files or self._scanned_files[0].last_use_ns >= self._unused_before
            )
            if is_outdated and not has_scanned:
                total_bytes = self._scan(lock_fd)
                has_scanned = True
                continue
            if not self._scanned_files:
                break
            file = heapq.heappop(self._scanned_files)
            if file.name in kept_names:
                continue  # the file is in use, so treat it as used after the scan
            if (current_file := self._find_file(file.name)) == file:
                (self.path / file.name).unlink(missing_ok=True)
                total_bytes -= file.num_bytes
            elif current_file is not None:
                heapq.heappush(self._scanned_files, current_file)
        return total_bytes

    def _scan(self, lock_fd: int) -> int:
        """Scan all files, remove partial files of killed processes, and return the total size."""
        for name in os.listdir(self.path):
            if _PARTIAL_PATTERN.fullmatch(name):
                with suppress(OSError):  # a folder, or not removable
                    (self.path / name).unlink()
        self._unused_before = time.time_ns() - _MAX_CLOCK_LAG_NS
        self._scanned_files = self.list_files()
        now = time.time_ns()
        for file in self._scanned_files:
            # If the clock was set back, new files would be evicted first.
            if file.last_use_ns > now:
                self.touch(file.name, self._unused_before)
        heapq.heapify(self._scanned_files)
        # The total is invalid until the caller writes it, because the disk may still be full.
        os.ftruncate(lock_fd, 0)
        return sum(file.num_bytes for file in self._scanned_files)

    @contextmanager
    def lock(self, timeout: float) -> Iterator[int | None]:
        """Hold the folder's lock, or yield None if other processes are writing.

        `timeout` is the time to wait for other processes, in seconds. The operating system releases
        the lock of a killed process.

        Raises:
            OSError: The lock file cannot be opened.
            ImportError: The system is Windows.
        """
        import fcntl  # not on Windows

        lock_fd = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS, 0o666)
        is_locked = False
        deadline = time.monotonic() + timeout
        try:
            while not is_locked:
                try:
                    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_locked = True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.01)
            yield lock_fd if is_locked else None
        finally:
            if is_locked:
                # Unlock explicitly, because a process forked in the meantime shares `lock_fd`.
                fcntl.flock(lock_fd, fcntl.LOCK_UN)
            os.close(lock_fd)


def _read_total(lock_fd: int) -> int | None:
    """Return the total size in the lock file, or None if the file is not exactly 20 digits."""
    digits = os.pread(lock_fd, 21, 0)  # one more byte than `_write_total` writes
    return int(digits) if len(digits) == 20 and digits.isdigit() else None


def _write_total(lock_fd: int, total_bytes: int) -> None:
    os.pwrite(lock_fd, b"%020d" % total_bytes, 0)
