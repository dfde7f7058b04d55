"""Where a measurement was taken: versions and hardware."""

import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["circumstances", "hardware", "today", "version", "versions"]

PACKAGES = ("hf-fp8kv", "torch", "transformers", "triton", "numba", "safetensors", "gguf")


def version(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that count."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def hardware() -> dict[str, object]:
    """Returns the processor, its cores, the threads that torch uses, and the GPUs."""
    import torch

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def today() -> str:
    """Returns the date and the time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def circumstances(suite: str, **more: object) -> dict[str, object]:
    """Returns what the result of every suite begins with.

    Args:
        suite: its name.
        more: what else to say of the hardware.
    """
    return {
        "suite": suite,
        "date": today(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": versions(),
        "hardware": hardware() | more,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
