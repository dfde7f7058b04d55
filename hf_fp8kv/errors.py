"""Everything this package raises on purpose.

    Fp8KVError
    ├── ConfigError      an argument, a model or a call that cannot work together
    ├── ScaleError       a scale or a file of scales that cannot be used
    ├── OutOfPagesError  a budget (max_pages, max_cache_len) that would be passed
    └── BackendError     a backend that was asked for by name and cannot run

A message says what was expected, what was found, and what to do. When one of them is raised, the
cache is as it was before the call.
"""

__all__ = ["BackendError", "ConfigError", "Fp8KVError", "OutOfPagesError", "ScaleError"]


class Fp8KVError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(Fp8KVError, ValueError):
    """An argument, a model or a call that cannot work together."""


class ScaleError(Fp8KVError, ValueError):
    """A scale, or a file of scales, that cannot be used."""


class OutOfPagesError(Fp8KVError, MemoryError):
    """A budget of pages or of tokens would be passed; the cache is as it was."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_out_of_pages, (self.args[0], self.needed, self.available)


class BackendError(Fp8KVError, RuntimeError):
    """A backend that was asked for by name and cannot run here."""


def _rebuild_out_of_pages(message: str, needed: int, available: int) -> OutOfPagesError:
    return OutOfPagesError(message, needed=needed, available=available)
