"""Backends: which ones there are, which run here, and which one a device gets."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..errors import BackendError
from ..formats import AUTO
from .pages import AttentionSpec, Pages
from .triton.target import is_interpreted


class Backend(Protocol):
    """The functions of a backend's module. Arguments and errors are those of registration.py."""

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
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return attention; `plan` is made here where it is None.

        `new`: keys and values of this call's tokens, to be stored before.
        """

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


def _load_numba() -> Backend:
    from .numba import backend

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
    "numba": _load_numba,
    "triton": load_triton,
    "reference": _load_reference,
}
CHOICES = ("auto", "torch", "numba", "triton")


def available_backends() -> dict[str, str | None]:
    """Return for each backend None if it runs here, otherwise why it does not."""
    numba = importlib.util.find_spec("numba")
    return {
        "torch": None,
        "numba": None if numba else "numba is not installed: pip install 'hf-fp8kv[cpu]'",
        "triton": _why_not_triton(),
    }


def _why_not_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    # Triton's interpreter runs kernels on a CPU: many times slower than anything else, for tests.
    if torch.cuda.is_available() or is_interpreted():
        return None
    return "torch finds no CUDA or ROCm device"


def choose_backend(name: str, device: torch.device) -> str:
    """Return the backend to use for pages on `device`: a key of `BACKENDS`.

    `name` is "auto", or the backend that a user insists on. Raise BackendError if the name is
    unknown, or if that backend cannot run on `device`.
    """
    if name == "reference":
        return name
    if name not in CHOICES:
        raise BackendError(f"backend: expected one of {', '.join(CHOICES)}, got {name!r}")
    why = available_backends()
    if name == AUTO:
        best = {"cpu": "numba", "cuda": "triton"}.get(device.type, "torch")
        known = best != "triton" or _kernels_fit(device)
        return best if known and why[best] is None else "torch"
    if why[name] is not None:
        raise BackendError(f"backend {name!r} cannot run here: {why[name]}")
    if name == "numba" and device.type != "cpu":
        raise BackendError(
            f"backend 'numba' expected pages on the CPU, got {device}; use backend='auto'"
        )
    interpreted = device.type == "cpu" and is_interpreted()
    if name == "triton" and device.type != "cuda" and not interpreted:
        raise BackendError(
            f"backend 'triton' expected pages on a CUDA or ROCm device, got {device}; use "
            "backend='auto'"
        )
    return name


def _kernels_fit(device: torch.device) -> bool:
    """Return whether kernels fit: GPUs before sm_80 have 64 KB of shared memory for a program."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def load_backend(name: str) -> Backend:
    """Return the backend called `name`, a key of `BACKENDS`. Imports what it needs."""
    return BACKENDS[name]()


def prepare_backend(name: str) -> None:
    """Load what the first call of the backend `name` would: its imports, kernels of a CPU.

    Triton's kernels are loaded by shape and dtype, so only calls can.
    """
    load_backend(name)
    if name == "numba":
        from .numba.backend import load_kernels

        load_kernels()
