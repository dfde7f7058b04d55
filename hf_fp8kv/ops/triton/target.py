"""The GPU that kernels are made for, and the one way they are started, or only compiled, for it."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...formats import Format


@dataclass(frozen=True)
class Target:
    """A GPU, as kernels see it.

    Attributes:
        vendor: "cuda" or "hip", as Triton calls them.
        arch: 90 for sm_90; "gfx942".
        processors: streaming multiprocessors, or compute units.
        interpreted: kernels run in Triton's interpreter, which knows no inline assembly.
    """

    vendor: str
    arch: int | str
    processors: int
    interpreted: bool = False

    @property
    def name(self) -> str:
        """ "sm_90", "gfx942"."""
        return f"sm_{self.arch}" if self.vendor == "cuda" else str(self.arch)

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Return the target with this name, of a usual size."""
        if name.startswith("sm_"):
            return cls("cuda", int(name[3:]), _PROCESSORS.get(name, 128))
        return cls("hip", name, _PROCESSORS.get(name, 256))

    @property
    def is_nvidia(self) -> bool:
        """Return whether it is one of NVIDIA's."""
        return self.vendor == "cuda"

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


# Of the chip that most people have: A100, RTX 3090, RTX 4090, H100, B200, RTX 5090, MI300X, MI355X.
_PROCESSORS = {
    "sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170,
    "gfx942": 304, "gfx950": 256,
}  # fmt: skip


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
_compile: Callable[..., None] | None = None


@functools.cache
def _detect(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("cuda", 90, 4, interpreted=True)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        return Target("hip", arch, properties.multi_processor_count)
    return Target(
        "cuda", 10 * properties.major + properties.minor, properties.multi_processor_count
    )


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


@contextmanager
def compiling(take: Callable[..., None]) -> Iterator[None]:
    """Make `launch` hand its arguments to `take`, and run nothing, inside the `with` block."""
    global _compile
    before, _compile = _compile, take
    try:
        yield
    finally:
        _compile = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start `kernel` on `grid`, unless an axis is 0: every kernel of this package is started here.

    `constants` are its constexpr parameters, and Triton's options (`num_warps`, ...).
    """
    if 0 in grid:
        return
    if _compile is not None:
        _compile(kernel, grid, args, constants)
        return
    # Triton starts kernels on the current device, which in a model spread over several GPUs is
    # another one for most layers.
    device = next(x.device for x in args if isinstance(x, torch.Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **constants)
    else:
        kernel[grid](*args, **constants)
