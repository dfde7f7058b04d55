"""The available backends, and the choice of a backend for a device."""

import functools
import importlib.util
from types import ModuleType

import torch

from ..errors import BackendError
from ..formats import AUTO
from ..utils.warn_once import warn_once
from .triton.target import get_target, is_interpreted

# Values of the argument `backend`. The backend "reference" is only for tests.
BACKEND_CHOICES = ("auto", "torch", "cpu", "triton")
BACKENDS = (*BACKEND_CHOICES[1:], "reference")
# Backends with schedules.
SCHEDULE_BACKENDS = frozenset({"triton"})
# Backends that check lengths on the device, and skip tokens without a page. All others read the
# lengths on the host.
DEVICE_CHECK_BACKENDS = frozenset({"triton"})
# Backends that attend to all tokens of a deterministic call at once. Others attend per token.
DETERMINISTIC_BACKENDS = frozenset({"cpu"})
# Whether the kernels of "cpu" and the package "triton" exist. The dict caches these checks, because
# Dynamo warns about `functools.cache`.
_is_present: dict[str, bool] = {}


def explain_backends() -> dict[str, str | None]:
    """Return None for each backend that runs here, and the reason for each that does not run."""
    return {name: _explain_unavailability(name) for name in BACKEND_CHOICES if name != AUTO}


def _explain_unavailability(name: str) -> str | None:
    if name == "triton":
        return _explain_triton_unavailability()
    if name == "cpu" and not _is_present.get(name):
        from .cpu.build import REPAIR, find_library

        _is_present[name] = find_library(torch.backends.cpu.get_cpu_capability()).exists()
        return None if _is_present[name] else f"its kernels are not compiled. To use it, {REPAIR}"
    return None


def _explain_triton_unavailability() -> str | None:
    if "triton" not in _is_present:
        _is_present["triton"] = importlib.util.find_spec("triton") is not None
    if not _is_present["triton"]:
        return "triton is not installed: pip install triton"
    # Triton's interpreter runs kernels on a CPU, for tests only. Other backends are far faster.
    if torch.cuda.is_available() or is_interpreted():
        return None
    return "torch found no CUDA or ROCm device"


def choose_backend(name: str, device: torch.device) -> str:
    """Return the backend to use for pages on `device`, one of `BACKENDS`.

    `name` is "auto" or a specific backend. If "auto" cannot use "cpu" on a CPU, or "triton" on
    another device, it falls back to "torch" with a warning.

    Raises:
        BackendError: The name is unknown, or the backend cannot run on `device`.
    """
    if name == "reference":
        return name
    if name not in BACKEND_CHOICES:
        raise BackendError(f"backend: expected one of {', '.join(BACKEND_CHOICES)}, got {name!r}")
    default = "cpu" if device.type == "cpu" else "triton"
    backend = default if name == AUTO else name
    reason = _explain_unavailability(backend) or _explain_unsupported_device(backend, device)
    if reason is None:
        return backend
    if name != AUTO:
        raise BackendError(f"backend {name!r} cannot run here: {reason}. Use backend='auto'")
    warn_once(f"using the slower backend 'torch' instead of {backend!r}: {reason}")
    return "torch"


def _explain_unsupported_device(name: str, device: torch.device) -> str | None:
    if name == "cpu" and device.type != "cpu":
        return f"it requires pages on the CPU, got {device.type}"
    if name != "triton" or (device.type == "cpu" and is_interpreted()):
        return None
    if device.type != "cuda":
        return f"it requires pages on a CUDA or ROCm device, got {device.type}"
    target = get_target(device)
    required = "it requires a GPU of sm_80 or later, gfx942 or gfx950, got "
    return None if target.is_supported else required + target.name


@functools.cache
def load_backend(name: str) -> ModuleType:
    """Import and return the module of a backend, one of `BACKENDS`.

    The module has `write`, `attend` and `gather` of api.py, without the argument `backend`.
    Backends with schedules also have `fill_schedule`.
    """
    module = name if name == "reference" else f"{name}.backend"
    return importlib.import_module(f".{module}", __package__)
