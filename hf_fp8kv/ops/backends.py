"""Backends: which ones there are, which run here, and which one a device gets."""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..errors import BackendError
from ..formats import AUTO
from ..utils.warn_once import warn_once
from .pages import AttentionSpec, Pages
from .triton.target import is_interpreted, target_of

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """The functions of a backend's module, with the arguments and errors of api.py."""

    def write(self, pages: Pages, key: Tensor, value: Tensor, lengths: Tensor) -> None:
        """Store `key`, `[B, Hkv, T, Dk]`, and `value`, `[B, Hkv, T, Dv]`, up to `lengths`."""

    def gather(
        self,
        pages: Pages,
        lengths: Tensor,
        side: str,
        start: int,
        stop: int,
        dtype: torch.dtype,
        ragged: bool,
    ) -> Tensor:
        """Return dense keys or values, `[B, Hkv, stop - start, D]`."""

    def attend(
        self,
        query: Tensor,
        pages: Pages,
        lengths: Tensor,
        start: int,
        stop: int,
        spec: AttentionSpec,
    ) -> Tensor:
        """Return the attention of `query`, `[B, Hq, T, Dk]`, as `[B, T, Hq, Dv]`."""


class PlanningBackend(Backend, Protocol):
    """A backend that never waits for its device: it knows no lengths, and splits work by a plan."""

    def write(
        self, pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, limit: int | None = None
    ) -> None:
        """Store tokens; those without a page, and those at positions from `limit` on, are not."""

    def attend(
        self,
        query: Tensor,
        pages: Pages,
        lengths: Tensor,
        start: int,
        stop: int,
        spec: AttentionSpec,
        plan: Tensor | None = None,
    ) -> Tensor:
        """Return attention; `plan` is made here where it is None."""

    def plan_rows(
        self, device: torch.device, batch: int, heads: int, length: int | None = None, rows: int = 1
    ) -> int:
        """Return the rows of a plan for `batch` sequences and `heads` KV heads."""

    def make_plan(
        self, plan: Tensor, lengths: Tensor, tokens: int, window: int, start: int, heads: int
    ) -> None:
        """Overwrite `plan`, `[rows, 4]`, int32, for sequences of `lengths`."""


def _load_torch() -> Backend:
    from .torch import backend

    return backend


def _load_cpu() -> Backend:
    from .cpu import backend

    return backend


@functools.cache
def load_triton() -> PlanningBackend:
    """Return the "triton" backend. Imports Triton."""
    from .triton import backend

    return backend


def _load_reference() -> Backend:
    from . import reference

    return reference


# "reference" is for tests; a user chooses among the others.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "torch": _load_torch,
    "cpu": _load_cpu,
    "triton": load_triton,
    "reference": _load_reference,
}
CHOICES = ("auto", "torch", "cpu", "triton")


def available_backends() -> dict[str, str | None]:
    """Return for each backend None if it runs here, otherwise why it does not."""
    return {name: _why_not(name) for name in CHOICES if name != AUTO}


def _why_not(name: str) -> str | None:
    if name == "triton":
        return _why_not_triton()
    if name == "cpu" and not _installed.get(name):
        from .cpu.build import REPAIR, find_library

        _installed[name] = find_library(torch.backends.cpu.get_cpu_capability()).exists()
        return None if _installed[name] else f"its kernels are not compiled; {REPAIR}"
    return None


# Not `functools.cache`, which Dynamo warns of.
_installed: dict[str, bool] = {}


def _is_installed(package: str) -> bool:
    if package not in _installed:
        _installed[package] = importlib.util.find_spec(package) is not None
    return _installed[package]


def _why_not_triton() -> str | None:
    if not _is_installed("triton"):
        return "triton is not installed: pip install triton"
    # Triton's interpreter runs kernels on a CPU: many times slower than anything else, for tests.
    if torch.cuda.is_available() or is_interpreted():
        return None
    return "torch finds no CUDA or ROCm device"


def choose_backend(name: str, device: torch.device) -> str:
    """Return the backend to use for pages on `device`: a key of `BACKENDS`.

    `name` is "auto", or the backend that a user insists on. A device other than a CPU that "auto"
    cannot give "triton" gets "torch", with a warning.

    Raises:
        BackendError: The name is unknown, or that backend cannot run on `device`.
    """
    if name == "reference":
        return name
    if name not in CHOICES:
        raise BackendError(f"backend: expected one of {', '.join(CHOICES)}, got {name!r}")
    best = name if name != AUTO else "cpu" if device.type == "cpu" else "triton"
    why = _why_not(best) or _why_not_on(best, device)
    if why is None:
        return best
    if name != AUTO:
        raise BackendError(f"backend {name!r} cannot run here: {why}; use backend='auto'")
    warn_once(logger, f"backend 'torch', which is slower, is used instead of {best!r}: {why}")
    return "torch"


def _why_not_on(name: str, device: torch.device) -> str | None:
    """Return why a backend cannot run on this device, or None."""
    if name == "cpu" and device.type != "cpu":
        return f"it expected pages on the CPU, got {device.type}"
    if name != "triton" or (device.type == "cpu" and is_interpreted()):
        return None
    if device.type != "cuda":
        return f"it expected pages on a CUDA or ROCm device, got {device.type}"
    gpu = target_of(device)
    expected = "it expected a GPU of sm_80 or later, gfx942 or gfx950, got "
    return None if gpu.is_supported else expected + gpu.name


@functools.cache
def load_backend(name: str) -> Backend:
    """Return the backend called `name`, a key of `BACKENDS`. Imports what it needs."""
    return BACKENDS[name]()
