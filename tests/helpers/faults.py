"""Failures of single calls that the package makes to allocate memory or to access files."""

import errno
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hf_fp8kv

PACKAGE = str(Path(hf_fp8kv.__file__).parent)
# Names of functions of torch and numpy that allocate memory, and of functions that access files.
MEMORY_FUNCTIONS = frozenset((
    "arange", "array", "asarray", "astype", "bincount", "cat", "clone", "concatenate",
    "contiguous", "copy", "copy_", "cpu", "cumsum", "empty", "expand", "flatnonzero", "flatten",
    "from_numpy", "full", "full_like", "index_copy_", "index_select", "int", "long", "new_empty",
    "new_full", "new_tensor", "new_zeros", "ones", "ones_like", "pad", "repeat",
    "repeat_interleave", "reshape", "stack", "take", "tensor", "tile", "to", "tobytes", "tolist",
    "unique", "where", "zeros", "zeros_like",
))  # fmt: skip
FILE_FUNCTIONS = frozenset((
    "close", "flock", "fstat", "fsync", "ftruncate", "listdir", "lstat", "mkdir", "open", "pread",
    "pwrite", "read", "rename", "replace", "safe_open", "save", "save_file", "scandir",
    "serialize", "unlink", "utime", "write",
))  # fmt: skip
Place = tuple[str, int, int]
"""File and line of the call, and its number among the calls of this line, from 1."""


class Faults:
    """Runs functions, counts their calls to the functions `names`, and lets one call fail.

    A profile function runs before each call, and the call raises its exception.

    Attributes:
        places: All calls, in order.
        make_error: Function that returns the error of the failing call.
    """

    def __init__(self, names: frozenset[str], make_error: Callable[[], BaseException]) -> None:
        self.names = names
        self.make_error = make_error
        self.places: list[Place] = []
        self.has_failed = False
        self._counts: Counter[tuple[str, int]] = Counter()
        self._failing_place: Place | None = None

    def run(self, call: Callable[[], Any], failing_place: Place | None = None) -> Any:
        """Run `call`, and return the type of the error if the call at `failing_place` failed."""
        self.places = []
        self.has_failed = False
        self._counts.clear()
        self._failing_place = failing_place
        old_profile = sys.getprofile()
        threading.setprofile(self._profile)  # for threads that start later
        sys.setprofile(self._profile)
        try:
            call()
            return None
        except BaseException as error:
            if not self.has_failed:
                raise
            return type(error)  # not the error, whose traceback holds local variables
        finally:
            sys.setprofile(old_profile)
            threading.setprofile(None)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            name = argument.__name__
            caller = frame
        elif event == "call":
            name = frame.f_code.co_name
            caller = frame.f_back
            if frame.f_code.co_filename.startswith(PACKAGE):
                return
        else:
            return
        if name not in self.names or caller is None:
            return
        file, line = caller.f_code.co_filename, caller.f_lineno
        if not file.startswith(PACKAGE) or self.has_failed:
            return
        while caller is not None:  # Python ignores an exception in `__del__`
            if caller.f_code.co_name == "__del__":
                return
            caller = caller.f_back
        self._counts[file, line] += 1
        place = (file, line, self._counts[file, line])
        self.places.append(place)
        if place == self._failing_place:
            self.has_failed = True
            raise self.make_error()


def make_disk_error() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


MEMORY_ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: torch.OutOfMemoryError("injected"), lambda: MemoryError("injected"),
    KeyboardInterrupt,
)  # fmt: skip
