"""Compile the kernels: `python -m hf_fp8kv.ops.cpu.build`, or the build hook of the wheel.

The libraries use no headers of Python or torch, so one wheel works with all versions of both.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
# Instructions for a user without compiled libraries.
REPAIR = "install a C++ compiler and run: python -m hf_fp8kv.ops.cpu.build"
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# Compiler flags of each library, by torch's name of the CPU capability, which does not cover VNNI.
TARGETS: dict[str, list[str]] = {"DEFAULT": []}
if platform.machine() in ("x86_64", "AMD64"):
    TARGETS["AVX2"] = _AVX2
    TARGETS["AVX512"] = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
    TARGETS["AVX512_VNNI"] = [*TARGETS["AVX512"], "-mavx512vnni"]
_OPTIONS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fwrapv",
    "-Wno-psabi",
]
if sys.platform == "linux":
    # Older systems than the compiler's have older versions of these two libraries.
    _OPTIONS += ["-static-libgcc", "-static-libstdc++"]


def find_library(capability: str) -> Path:
    """Return the path of the library for a CPU capability, a key of `TARGETS`."""
    target = capability if capability in TARGETS else "DEFAULT"
    return SOURCE.with_name(f"kernels_{target.lower()}.so")


def compute_stamp() -> int:
    """Return a checksum of the source and of the compiler options."""
    return zlib.crc32(SOURCE.read_bytes() + Path(__file__).read_bytes())


def build() -> list[Path]:
    """Compile the source for all targets, and return the libraries.

    Existing libraries are removed first. The environment variable CXX may name the compiler.

    Raises:
        OSError: There is no compiler.
        subprocess.CalledProcessError: The compiler fails.
    """
    for target in TARGETS:
        find_library(target).unlink(missing_ok=True)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "c++"
    command = [*shlex.split(compiler), *_OPTIONS, f"-DSTAMP={compute_stamp()}u", str(SOURCE)]
    processes = {}
    for target, flags in TARGETS.items():
        new_path = find_library(target).with_suffix(f".{os.getpid()}")
        processes[new_path] = subprocess.Popen([*command, *flags, "-o", str(new_path)])
    failures = [process for process in processes.values() if process.wait()]
    if failures:
        for new_path in processes:
            new_path.unlink(missing_ok=True)
        raise subprocess.CalledProcessError(failures[0].returncode, failures[0].args)
    return [new_path.replace(new_path.with_suffix(".so")) for new_path in processes]


if __name__ == "__main__":
    for path in build():
        sys.stdout.write(f"{path}\n")
