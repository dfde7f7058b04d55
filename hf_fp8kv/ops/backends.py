"""The available backends, and the choice of a backend for a device."""

import functools
import importlib.util
import logging
from types import ModuleType

import torch

from ..errors import BackendError
from ..formats import AUTO
from ..utils.warn_once import warn_once
from .triton.target import is_interpreted, target_of

logger = logging.getLogger(__name__)


CHOICES = ("auto", "torch", "cpu", "triton")
# "reference" is for tests. Users choose from `CHOICES`.
BACKENDS = (*CHOICES[1:], "reference")


def available_backends() -> dict[str, str | None]:
    """Return, for each backend, None if it runs here, or the reason why it does not run."""
    return {name: _find_obstacle(name) for name in CHOICES if name != AUTO}


def _find_obstacle(name: str) -> str | None:
    if name == "triton":
        return _find_triton_obstacle()
    if name == "cpu" and not _presence.get(name):
        from .cpu.build import REPAIR, find_library

        _presence[name] = find_library(torch.backends.cpu.get_cpu_capability()).exists()
        return None if _presence[name] else f"its kernels are not compiled. To use it, {REPAIR}"
    return None


# Cached in a dict, because Dynamo warns about `functools.cache`.
_presence: dict[str, bool] = {}


def _is_installed(package: str) -> bool:
    if package not in _presence:
        _presence[package] = importlib.util.find_spec(package) is not None
    return _presence[package]


def _find_triton_obstacle() -> str | None:
    if not _is_installed("triton"):
        return "triton is not installed: pip install triton"
    # Triton's interpreter runs kernels on a CPU, for tests only. Other backends are far faster.
    if torch.cuda.is_available() or is_interpreted():
        return None
    return "torch finds no CUDA or ROCm device"


def choose_backend(name: str, device: torch.device) -> str:
    """Return the backend to use for pages on `device`, one of `BACKENDS`.

    `name` is "auto" or a specific backend. If "auto" cannot use "triton" on a device other than a
    CPU, it falls back to "torch" with a warning.

    Raises:
        BackendError: The name is unknown, or the backend cannot run on `device`.
    """
    if name == "reference":
        return name
    if name not in CHOICES:
        raise BackendError(f"backend: expected one of {', '.join(CHOICES)}, got {name!r}")
    backend = name if name != AUTO else "cpu" if device.type == "cpu" else "triton"
    reason = _find_obstacle(backend) or _find_device_obstacle(backend, device)
    if reason is None:
        return backend
    if name != AUTO:
        raise BackendError(f"backend {name!r} cannot run here: {reason}. Use backend='auto'")
    warn_once(logger, f"backend 'torch', which is slower, is used instead of {backend!r}: {reason}")
    return "torch"


def _find_device_obstacle(name: str, device: torch.device) -> str | None:
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
def load_backend(name: str) -> ModuleType:
    """Import and return the module of a backend, one of `BACKENDS`.

    The module has the operations of api.py, with the same arguments and errors.
    """
    module = name if name == "reference" else f"{name}.backend"
    return importlib.import_module(f".{module}", __package__)
