"""The GPU that kernels are made for, and the one way they are started, or only compiled, for it."""

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
    """What the programs of one processor share.

    Attributes:
        shared: bytes of shared memory that all of them have together.
        threads: at most that many of them.
        registers: of 32 bits, for all threads together; not used for AMD's.
    """

    shared: int
    threads: int
    registers: int = 65536


@dataclass(frozen=True)
class Target:
    """A GPU, as kernels see it.

    Attributes:
        vendor: "cuda" or "hip", as Triton calls them.
        arch: 90 for sm_90; "gfx942".
        processors: streaming multiprocessors, or compute units.
        interpreted: kernels run in Triton's interpreter, which knows no inline assembly.
        resources: of one processor, as a device says; None: those of a chip of this name.
        parameters: for experiments, attributes of `LaunchConfig` and `PlanConfig` by their names,
            and `programs`, the result of `expected_programs`.
    """

    vendor: str
    arch: int | str
    processors: int
    interpreted: bool = False
    resources: Resources | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """ "sm_90", "gfx942"."""
        return f"sm_{self.arch}" if self.vendor == "cuda" else str(self.arch)

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Return the target with this name, of a usual size."""
        processors, _ = CHIPS.get(name, _UNKNOWN)
        if name.startswith("sm_"):
            return cls("cuda", int(name[3:]), processors)
        return cls("hip", name, processors)

    @property
    def is_nvidia(self) -> bool:
        """Return whether it is one of NVIDIA's."""
        return self.vendor == "cuda"

    @property
    def is_supported(self) -> bool:
        """Return whether the kernels are for this GPU.

        NVIDIA's before sm_80 have 64 KB of shared memory for a program. Matrix units of gfx90a
        flush subnormal float16 numbers, as which int8 is multiplied. RDNA has not been compiled
        for.
        """
        return int(self.arch) >= 80 if self.is_nvidia else self.arch in ("gfx942", "gfx950")

    @property
    def shares(self) -> Resources:
        """What programs of one processor share: as the device says, or of a chip of this name."""
        return self.resources or CHIPS.get(self.name, _UNKNOWN)[1]

    def fit(self, registers: int, warps: int, shared: int) -> int:
        """Return how many programs one processor holds at once.

        Args:
            registers: of a thread; of AMD's, vector and accumulation registers together.
            warps: of a program.
            shared: bytes of shared memory of a program.
        """
        has = self.shares
        if self.is_nvidia:
            # Registers are given out to warps by eight per thread.
            by_registers = has.registers // (cdiv(registers, 8) * 8 * 32 * warps)
            by_threads = has.threads // (32 * warps)
            return min(by_registers, by_threads, has.shared // (shared + _RESERVED))
        # Four units, each with 512 registers per lane for its warps, at most eight.
        per_unit = min(8, 512 // (cdiv(max(registers, 1), 8) * 8))
        return min(per_unit * 4 // warps, has.shared // max(shared, 1))

    def converts(self, fmt: Format) -> bool:
        """Return whether codes of a format are converted by an instruction, or by placing bytes.

        NVIDIA: PTX ISA, `cvt` with .e4m3x2 and .e5m2x2, from sm_89; Triton places the bytes of
        E5M2, the upper half of a float16, also below. AMD: the FNUZ formats on gfx942, the OCP
        ones on gfx950 (CDNA 3 and 4 ISA, v_cvt_pk_f32_fp8 and v_cvt_scalef32_pk_*).
        """
        if self.is_nvidia:
            assert isinstance(self.arch, int)
            e4m3 = [torch.float8_e4m3fn] if self.arch >= 89 else []
            return fmt.torch_dtype in [torch.float8_e5m2, *e4m3]
        if self.arch == "gfx942":
            return fmt.torch_dtype == torch.float8_e4m3fnuz
        is_ocp = fmt.torch_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return is_ocp and str(self.arch).startswith(("gfx95", "gfx12"))


# Processors of the chip that most people have, and the resources of each: A100, RTX 3090, RTX 4090,
# H100, B200, RTX 5090, MI300X, MI355X. They are for kernels that are compiled without a GPU, which
# would be asked for its own. CUDA C++ Programming Guide, compute capabilities; CDNA 3 and 4 ISA,
# local data share.
CHIPS = {
    "sm_80": (108, Resources(164 << 10, 2048)), "sm_86": (82, Resources(100 << 10, 1536)),
    "sm_89": (128, Resources(100 << 10, 1536)), "sm_90": (132, Resources(228 << 10, 2048)),
    "sm_100": (148, Resources(228 << 10, 2048)), "sm_120": (170, Resources(100 << 10, 1536)),
    "gfx942": (304, Resources(64 << 10, 2048)), "gfx950": (256, Resources(160 << 10, 2048)),
}  # fmt: skip
_UNKNOWN = (128, Resources(64 << 10, 1536))
# Bytes of shared memory that a program takes on NVIDIA's besides its own.
_RESERVED = 1024


def cdiv(x: int, y: int) -> int:
    """Return `x / y` rounded up. (Triton's own, made to run in kernels too, takes 1 us.)"""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Return the least power of two that is not below `x`."""
    return 1 << (x - 1).bit_length()


def is_interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_assumed: Target | None = None


@functools.cache
def _detect(device: torch.device) -> Target:
    if device.type == "cpu" or is_interpreted():
        return Target("cuda", 90, 4, interpreted=True)
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    resources = Resources(
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
        getattr(properties, "regs_per_multiprocessor", Resources.registers),
    )
    if torch.version.hip:
        name = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        return Target("hip", name, processors, resources=resources)
    arch = 10 * properties.major + properties.minor
    return Target("cuda", arch, processors, resources=resources)


def target_of(device: torch.device) -> Target:
    """Return the GPU that kernels on tensors of `device` are made for."""
    return _detect(device) if _assumed is None else _assumed


@contextmanager
def assuming(target: Target) -> Iterator[None]:
    """Make kernels for `target` inside the `with` block, on any device; for tests and checks."""
    global _assumed
    before, _assumed = _assumed, target
    try:
        yield
    finally:
        _assumed = before


class Launched(NamedTuple):
    """A launch, and the kernel that Triton compiled or found for it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: Any


@dataclass
class Recorded:
    """The work of operations inside of `recording`.

    Attributes:
        starts: Whether kernels start. Otherwise `compiled` of each launch is None.
        launches: All launches, in order.
        allocations: The results of `allocate`, in order.
    """

    starts: bool
    launches: list[Launched] = field(default_factory=list)
    allocations: list[torch.Tensor] = field(default_factory=list)


class _Recorder(threading.local):
    recorded: Recorded | None = None


_recorder = _Recorder()

# Of every kernel that says nothing else. Triton 3.9 warns where nothing is said of fusing products
# with sums, since 3.10 will not do it by itself.
_OPTIONS = {"enable_fp_fusion": True}


@contextmanager
def recording(*, starts: bool = True) -> Iterator[Recorded]:
    """Return a record of this thread's launches inside of the `with` block, none of them replayed.

    With `starts=False` they start nothing.
    """
    before, _recorder.recorded = _recorder.recorded, Recorded(starts)
    try:
        yield _recorder.recorded
    finally:
        _recorder.recorded = before


def is_recording() -> bool:
    """Return whether this thread is inside of `recording`."""
    return _recorder.recorded is not None


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for launches to write. Calls that are replayed allocate nowhere else."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _recorder.recorded is not None:
        _recorder.recorded.allocations.append(made)
    return made


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start `kernel` on `grid`, unless an axis is 0: every kernel of this package is started here.

    `constants` are its constexpr parameters, and Triton's options (`num_warps`, ...).

    Raises:
        BackendError: Triton finds no C compiler, or the compiler fails.
    """
    if 0 in grid:
        return
    constants, recorded = _OPTIONS | constants, _recorder.recorded
    if recorded is not None and not recorded.starts:
        recorded.launches.append(Launched(kernel, grid, args, constants, None))
        return
    # Triton starts kernels on the current device, which in a model spread over several GPUs is
    # another one for most layers.
    device = next(x.device for x in args if isinstance(x, torch.Tensor))
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
            f"builds a launcher for each kernel, got {error}; install them (gcc, python3-dev), or "
            "pass backend='torch', which is slower"
        ) from error
    if recorded is not None:
        recorded.launches.append(Launched(kernel, grid, args, constants, compiled))
