"""The errors that this package defines.

    FP8KVError
    ├── ConfigError      incompatible or invalid arguments, model or call
    ├── ScaleError       unusable scales, or an unusable file of scales
    ├── OutOfPagesError  a budget (max_pages, max_cache_len) would be exceeded
    ├── BackendError     a backend requested by name cannot run
    └── EngineError      the engine of a server stopped unexpectedly

A message states what was expected, what was passed, and what to do. After an error the cache is as
it was before the call.
"""

import functools


class FP8KVError(Exception):
    """Base of every error that this package defines."""


class ConfigError(FP8KVError, ValueError):
    """Incompatible or invalid arguments, model or call."""


class ScaleError(FP8KVError, ValueError):
    """Unusable scales, or an unusable file of scales."""


class OutOfPagesError(FP8KVError, MemoryError):
    """A budget of pages or of tokens would be exceeded.

    Attributes:
        needed: Number of pages that the call needs, or of stored and new tokens per sequence.
        available: Number of pages that are left, or the maximum number of tokens per sequence.
    """

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available

    @classmethod
    def for_tokens(cls, limit: int, num_stored: int, num_new: int) -> "OutOfPagesError":
        """Return the error for a sequence with more than `limit` stored and new tokens."""
        return cls(
            f"expected at most {limit} tokens per sequence (max_cache_len), got {num_stored} "
            f"stored and {num_new} new. Set a larger max_cache_len, or crop or reset the cache",
            needed=num_stored + num_new,
            available=limit,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(
            OutOfPagesError, needed=self.needed, available=self.available
        ), self.args


class BackendError(FP8KVError, RuntimeError):
    """A backend requested by name cannot run here."""


class EngineError(FP8KVError, RuntimeError):
    """The engine of a server stopped unexpectedly."""
