"""The GPU that kernels are compiled for, and the function that launches kernels."""

import functools
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...errors import BackendError
from ...formats import Format


@dataclass(frozen=True)
class Resources:
    """Resources that the programs on one SM share.

    Attributes:
        shared_bytes: Shared memory, in bytes.
        max_threads: Maximum number of threads.
        registers: Number of 32-bit registers of all threads together. Not used for AMD.
    """

    shared_bytes: int
    max_threads: int
    registers: int = 65536


@dataclass(frozen=True)
class Target:
    """Properties of a GPU that kernels depend on.

    Attributes:
        vendor: Triton's name: "cuda" or "hip".
        arch: Architecture, such as 90 (sm_90) or "gfx942".
        sm_count: Number of streaming multiprocessors (SM) or compute units.
        interpreted: Whether kernels run in Triton's interpreter, which does not support inline
            assembly.
        resources: Resources of one SM as reported by the device. None means the resources of
            a chip with this name.
        parameters: For experiments: attributes of `LaunchConfig` and `ScheduleConfig` by name, and
            `programs`, the result of `estimate_programs`.
    """

    vendor: str
    arch: int | str
    sm_count: int
    interpreted: bool = False
    resources: Resources | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The name, such as "sm_90" or "gfx942"."""
        return f"sm_{self.arch}" if self.vendor == "cuda" else str(self.arch)

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Return a target with this name and the size of a common chip."""
        sm_count, _ = CHIPS.get(name, _UNKNOWN_CHIP)
        if name.startswith("sm_"):
            return cls("cuda", int(name.removeprefix("sm_")), sm_count)
        return cls("hip", name, sm_count)

    @property
    def is_nvidia(self) -> bool:
        """Whether this is an NVIDIA GPU."""
        return self.vendor == "cuda"

    @property
    def is_supported(self) -> bool:
        """Whether the kernels support this GPU.

        NVIDIA GPUs before sm_80 have at most 96 KB of shared memory per program. The matrix units
        of gfx90a flush subnormal float16 values, which int8 codes are decoded to. Kernels have
        never been compiled for RDNA.
        """
        return int(self.arch) >= 80 if self.is_nvidia else self.arch in ("gfx942", "gfx950")

    def count_programs(self, registers: int, num_warps: int, shared: int) -> int:
        """Return the number of programs that one SM runs at once.

        Args:
            registers: Registers per thread. On AMD, vector and accumulation registers together.
            num_warps: Number of warps per program.
            shared: Shared memory per program, in bytes.
        """
        sm = self.resources or CHIPS.get(self.name, _UNKNOWN_CHIP)[1]
        if self.is_nvidia:
            # Registers are allocated to warps in steps of eight per thread.
            by_registers = sm.registers // (cdiv(registers, 8) * 8 * 32 * num_warps)
            by_threads = sm.max_threads // (32 * num_warps)
            return min(by_registers, by_threads, sm.shared_bytes // (shared + _RESERVED_BYTES))
        # A compute unit has four SIMDs, each with 512 registers per lane and at most eight warps.
        warps_per_simd = min(8, 512 // (cdiv(max(registers, 1), 8) * 8))
        return min(warps_per_simd * 4 // num_warps, sm.shared_bytes // max(shared, 1))

    def converts(self, fmt: Format) -> bool:
        """Return whether an instruction, or a move of bytes, converts codes of a format.

        NVIDIA: `cvt` with .e4m3x2 and .e5m2x2 from sm_89 on (PTX ISA). On older GPUs Triton also
        converts E5M2, because its byte is the upper half of a float16. AMD: FNUZ formats on gfx942,
        OCP formats on gfx950 (CDNA 3 and 4 ISA, v_cvt_pk_f32_fp8 and v_cvt_scalef32_pk_*).
        """
        if self.is_nvidia:
            assert isinstance(self.arch, int)
            e4m3 = [torch.float8_e4m3fn] if self.arch >= 89 else []
            return fmt.torch_dtype in [torch.float8_e5m2, *e4m3]
        if self.arch == "gfx942":
            return fmt.torch_dtype == torch.float8_e4m3fnuz
        is_ocp = fmt.torch_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return is_ocp and str(self.arch).startswith(("gfx95", "gfx12"))


# Number of SMs of the most common chips, and the resources of one SM: A100, RTX 3090, RTX 4090,
# H100, B200, RTX 5090, MI300X, MI355X. These values are only used to compile kernels without a GPU.
# Sources: CUDA C++ Programming Guide (compute capabilities), CDNA 3 and 4 ISA (local data share).
CHIPS = {
    "sm_80": (108, Resources(164 << 10, 2048)),
    "sm_86": (82, Resources(100 << 10, 1536)),
    "sm_89": (128, Resources(100 << 10, 1536)),
    "sm_90": (132, Resources(228 << 10, 2048)),
    "sm_100": (148, Resources(228 << 10, 2048)),
    "sm_120": (170, Resources(100 << 10, 1536)),
    "gfx942": (304, Resources(64 << 10, 2048)),
    "gfx950": (256, Resources(160 << 10, 2048)),
}
_UNKNOWN_CHIP = (128, Resources(64 << 10, 1536))
# Shared memory that the system reserves for each program on NVIDIA GPUs, in bytes.
_RESERVED_BYTES = 1024


def cdiv(x: int, y: int) -> int:
    """Return `x / y` rounded up. (`triton.cdiv` takes 1 us, because it also works in kernels.)"""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Return the smallest power of two that is at least `x`."""
    return 1 << (x - 1).bit_length()


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class _Assumption:
    """The target of `assuming`, or None."""

    target: Target | None = None


assumption = _Assumption()


@functools.cache
def _detect_target(device: torch.device) -> Target:
    if device.type == "cpu" or is_interpreted():
        return Target("cuda", 90, 4, interpreted=True)
    properties = torch.cuda.get_device_properties(device)
    sm_count = properties.multi_processor_count
    resources = Resources(
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
        getattr(properties, "regs_per_multiprocessor", Resources.registers),
    )
    if torch.version.hip:
        name = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        return Target("hip", name, sm_count, resources=resources)
    return Target("cuda", 10 * properties.major + properties.minor, sm_count, resources=resources)


def get_target(device: torch.device) -> Target:
    """Return the GPU that kernels for tensors on `device` are compiled for."""
    return assumption.target or _detect_target(device)


@contextmanager
def assuming(target: Target) -> Iterator[None]:
    """Compile kernels for `target` inside the `with` block, on any device. For tests and checks."""
    old_target = assumption.target
    assumption.target = target
    try:
        yield
    finally:
        assumption.target = old_target


class Launch(NamedTuple):
    """A launch, with the compiled kernel that Triton used for it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: Any


@dataclass
class LaunchRecord:
    """Launches and allocations of operations within `recording`.

    Attributes:
        dry_run: Whether kernels are not launched. Then `compiled` of each launch is None.
        launches: All launches, in order.
        allocations: The results of `allocate`, in order.
    """

    dry_run: bool
    launches: list[Launch] = field(default_factory=list)
    allocations: list[torch.Tensor] = field(default_factory=list)


class _Recorder(threading.local):
    recorded: LaunchRecord | None = None


recorder = _Recorder()

# Triton 3.9 warns without this option, because Triton 3.10 changes its default.
_DEFAULT_OPTIONS = {"enable_fp_fusion": True}


@contextmanager
def recording(*, dry_run: bool = False) -> Iterator[LaunchRecord]:
    """Record this thread's launches within the `with` block. None of them is replayed.

    With `dry_run`, kernels are not launched.
    """
    outer_record = recorder.recorded
    recorder.recorded = LaunchRecord(dry_run)
    try:
        yield recorder.recorded
    finally:
        recorder.recorded = outer_record


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory for launches to write. Operations that are replayed only allocate here."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if recorder.recorded is not None:
        recorder.recorded.allocations.append(tensor)
    return tensor


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` on `grid`, unless an axis is 0.

    All launches that are not replayed start here. `constants` are the kernel's constexpr
    parameters, and Triton's options (`num_warps`, ...).

    Raises:
        BackendError: Triton finds no C compiler, or the compiler fails.
    """
    if 0 in grid:
        return
    constants = _DEFAULT_OPTIONS | constants
    recorded = recorder.recorded
    if recorded is not None and recorded.dry_run:
        recorded.launches.append(Launch(kernel, grid, args, constants, None))
        return
    # Triton launches kernels on the current device. In a model that is spread over several GPUs,
    # that is the wrong device for most layers.
    device = next(argument.device for argument in args if isinstance(argument, torch.Tensor))
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                compiled = kernel[grid](*args, **constants)
        else:
            compiled = kernel[grid](*args, **constants)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        if isinstance(error, RuntimeError) and "C compiler" not in str(error):
            raise
        raise BackendError(
            "backend 'triton': expected a C compiler and the headers of Python, with which Triton "
            f"builds a launcher for each kernel, got {error}. Install them (gcc, python3-dev), or "
            "pass backend='torch', which is slower"
        ) from error
    if recorded is not None:
        recorded.launches.append(Launch(kernel, grid, args, constants, compiled))
