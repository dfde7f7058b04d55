"""Environment of a measurement: versions, hardware, commit and load; and of its processes."""

import datetime
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("hf-fp8kv", "torch", "transformers", "triton", "numba", "safetensors", "gguf")

# A machine is idle if other processes use at most this share of its CPU time.
_IDLE = 0.05
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
    """Return the CPU, its instruction sets and cores, torch's threads, and the GPUs."""
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
    # Triton's variables (an interpreter, a debugger, dumps) are meant for a user's runs, except the
    # place of its cache.
    kept = {"TRITON_CACHE_DIR", "TRITON_HOME"}
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_") or k in kept}
    # This process may have found the package by its own path.
    return {**variables, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def utc_now() -> str:
    """Return date and time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe_run(suite: str, **extra_hardware: object) -> dict[str, object]:
    """Return the first entries of a result. Call it before the measurement: it observes the load.

    Args:
        suite: Name of the benchmark.
        extra_hardware: Further entries of the hardware.

    Returns:
        `suite`, `date`, `command`, `commit`, `versions`, `hardware`, `idle`, and
        `used_by_others`, the share of CPU time. Either of the last two is None if it is not known.
    """
    share = share_of_others()
    return {
        "suite": suite,
        "date": utc_now(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware() | extra_hardware,
        "idle": None if share is None else share <= _IDLE,
        "used_by_others": share,
    }


def commit(folder: Path = Path(__file__).parents[1]) -> str | None:
    """Return the git commit of a package's checkout, with "-dirty" if tracked files differ from it.

    Returns:
        None outside a checkout, and for a package that lies in a checkout but is not part of it.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def share_of_others(seconds: float = 0.5) -> float | None:
    """Return the share of this machine's CPU time that other processes use during `seconds`."""
    try:
        import psutil  # a requirement of accelerate
    except ImportError:
        return None

    def read() -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        total = sum(spent for name, spent in times.items() if not name.startswith("guest"))
        return total, times["idle"] + times.get("iowait", 0.0), time.process_time()

    before = read()
    time.sleep(seconds)
    total, waiting, own = (b - a for a, b in zip(before, read(), strict=True))
    return None if total <= 0 else round(min(max(1 - (waiting + own) / total, 0.0), 1.0), 3)


def _cpu(field: str) -> str:
    """Return a field of the first CPU in /proc/cpuinfo, or an empty text."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(field):
                return line.split(":", 1)[1].strip()
    return ""
