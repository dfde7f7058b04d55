"""Describe the environment of a measurement: versions, hardware, commit and load."""

import datetime
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_PACKAGES = ("hf-fp8kv", "torch", "transformers", "triton", "safetensors", "gguf")

# A machine is idle if other processes use at most this share of its CPU time.
_MAX_IDLE_LOAD = 0.05
# Linux's names of the instruction sets that affect speed the most.
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def find_version(*packages: str) -> str:
    """Return the version of the first installed package of several, or "not installed"."""
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return "not installed"


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of relevant packages."""
    return {"python": platform.python_version(), **{name: find_version(name) for name in _PACKAGES}}


def describe_hardware() -> dict[str, object]:
    """Return the CPU, its instruction sets and cores, torch's threads, and the GPUs."""
    import torch

    return {
        "cpu": _read_cpu_field("model name") or platform.processor() or platform.machine(),
        "instructions": [
            name for name in _INSTRUCTION_SETS if name in _read_cpu_field("flags").split()
        ],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def describe_run(suite: str, **extra_hardware: object) -> dict[str, object]:
    """Return the first entries of the result of benchmark `suite`.

    Call this before measuring. `used_by_others` is the share of CPU time of other processes.
    """
    other_load = measure_other_load()
    return {
        "suite": suite,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": find_commit(),
        "versions": list_versions(),
        "hardware": describe_hardware() | extra_hardware,
        "idle": other_load <= _MAX_IDLE_LOAD,
        "used_by_others": other_load,
    }


def find_commit(folder: Path = Path(__file__).parents[1]) -> str | None:
    """Return the git commit of a package's checkout, with "-dirty" if tracked files differ from it.

    Returns:
        The commit, or None if the package is not in a checkout that tracks it.
    """

    def run_git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        run_git("ls-files", "--error-unmatch", "__init__.py")
        return run_git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def measure_other_load(seconds: float = 0.5) -> float:
    """Return the share of this machine's CPU time that other processes use during `seconds`."""
    import psutil

    start = time.process_time()
    total_load: float = psutil.cpu_percent(seconds) / 100
    own_load = (time.process_time() - start) / (seconds * (os.cpu_count() or 1))
    return round(min(max(total_load - own_load, 0.0), 1.0), 3)


def _read_cpu_field(name: str) -> str:
    """Return the field `name` of the first CPU in /proc/cpuinfo, or "" if it is missing."""
    path = Path("/proc/cpuinfo")
    cpu_lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in cpu_lines if line.startswith(name)), "")
