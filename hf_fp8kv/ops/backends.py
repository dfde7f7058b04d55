"""Backends: which ones there are, which run here, and which one a device gets."""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from ..errors import BackendError
from ..formats import AUTO
from .triton.target import is_interpreted

__all__ = ["BACKENDS", "CHOICES", "available_backends", "choose_backend", "load_backend"]

# name -> module. Each has write, attend and gather, with reference.py's arguments; "triton" has a
# limit and plans besides. "reference" is for tests; a user chooses among the others.
BACKENDS = {
    "torch": ".torch.backend",
    "numba": ".numba.backend",
    "triton": ".triton.backend",
    "reference": ".reference",
}
CHOICES = ("auto", "torch", "numba", "triton")


def available_backends() -> dict[str, str | None]:
    """Returns for each backend None if it runs here, otherwise why it does not."""
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
    """Returns the backend to use on `device`: a key of `BACKENDS`.

    Args:
        name: "auto", or the backend that a user insists on.
        device: where the pages are.

    Raises:
        BackendError: the name is unknown, or that backend cannot run on `device`.
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
    """Whether kernels fit on a CUDA or ROCm device: GPUs before sm_80 have 64 KB for a program."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def load_backend(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name], __package__)
