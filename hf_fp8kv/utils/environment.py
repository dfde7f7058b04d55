"""Environment of a measurement: versions and hardware; and that of processes started for one."""

import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("hf-fp8kv", "torch", "transformers", "triton", "numba", "safetensors", "gguf")

# Instruction sets on which the speed of a CPU depends most, as Linux calls them.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def version(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter here."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def hardware() -> dict[str, object]:
    """Return the processor, what it multiplies with, its cores, torch's threads, and the GPUs."""
    import torch

    return {
        "cpu": _cpu("model name") or platform.processor() or platform.machine(),
        "instructions": [name for name in _INSTRUCTIONS if name in _cpu("flags").split()],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def make_environment() -> dict[str, str]:
    """Return the environment of a process of this package that compiles kernels."""
    # What Triton's variables say of a user's runs (an interpreter, a debugger, dumps) is not meant
    # for these; where its cache is stays.
    kept = {"TRITON_CACHE_DIR", "TRITON_HOME"}
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_") or k in kept}
    # This process may have been told where the package is by its own path.
    return {**variables, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def utc_now() -> str:
    """Return date and time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe_run(suite: str, **extra_hardware: object) -> dict[str, object]:
    """Return the first entries of a suite's result: date, command, versions, hardware.

    Args:
        suite: the name of the suite.
        extra_hardware: further entries for the hardware.
    """
    return {
        "suite": suite,
        "date": utc_now(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": versions(),
        "hardware": hardware() | extra_hardware,
    }


def _cpu(field: str) -> str:
    """Return what Linux says of the first processor, or nothing."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(field):
                return line.split(":", 1)[1].strip()
    return ""
