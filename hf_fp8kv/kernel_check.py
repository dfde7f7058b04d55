"""Every kernel compiled for every GPU that is supported, without one: `hf-fp8kv check --kernels`.

The functions that a cache calls are called on tensors on the CPU, and each kernel that they would
start is compiled for the target instead: so what is checked is what would run, with the same
constants, and with the alignment that Triton finds in the same arguments. kernel_assembly.py reads
the machine code; the rules are in `violations`.

One process compiles for one target: Triton 3.6 converts FP8 for every target the way that the first
one in a process needs. Triton's own cache makes a second run quick; it goes by the kernels' source.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .kernel_assembly import Assembly, read
from .kernel_variants import Variant, call, variants

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["TARGETS", "Row", "check_targets", "compile_kernels", "tables", "violations"]

Progress: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class Device:
    """What the programs of one processor share.

    Attributes:
        shared: bytes of shared memory that one program may have.
        shared_in_all: bytes that all of them have together.
        threads: at most that many of them.
    """

    shared: int
    shared_in_all: int
    threads: int


# CUDA C++ Programming Guide, compute capabilities; CDNA 3 and 4 ISA, local data share.
TARGETS = {
    "sm_80": Device(163 << 10, 164 << 10, 2048),
    "sm_86": Device(99 << 10, 100 << 10, 1536),
    "sm_89": Device(99 << 10, 100 << 10, 1536),
    "sm_90": Device(227 << 10, 228 << 10, 2048),
    "sm_100": Device(227 << 10, 228 << 10, 2048),
    "sm_120": Device(99 << 10, 100 << 10, 1536),
    "gfx942": Device(64 << 10, 64 << 10, 2048),
    "gfx950": Device(160 << 10, 160 << 10, 2048),
}
# Bytes of shared memory that a program takes on NVIDIA's besides its own.
RESERVED = 1024


@dataclass(frozen=True)
class Row:
    """One kernel that a variant starts, as compiled for one target.

    Attributes:
        target, variant, kernel: which.
        registers, spills, loop, conversions, ...: see Assembly.
        shared: bytes of shared memory of a program.
        programs: how many programs fit on a processor.
        per_kib: instructions of a warp per KiB of keys and values, in the main loop.
        violations: which rules it breaks.
    """

    target: str
    variant: str
    kernel: str
    warps: int = 0
    registers: int = 0
    spills: int = 0
    shared: int = 0
    programs: int = 0
    loop: int = 0
    wide_bytes: int = 0
    byte_loads: int = 0
    conversions: int = 0
    per_kib: float | None = None
    violations: tuple[str, ...] = ()


def check_targets(
    names: Sequence[str] = tuple(TARGETS), *, progress: Progress = lambda *_: None
) -> dict[str, list[Row]]:
    """Returns the rows of each target; two processes at a time.

    A process that fails is a row that says so.
    """
    names = list(dict.fromkeys(names))
    of_each = len(variants())
    done = 0
    lock = threading.Lock()

    def tell(row: str) -> None:
        nonlocal done
        with lock:
            done += 1
            progress(row, min(1.0, done / (of_each * len(names))))

    def check(name: str) -> list[Row]:
        return list(_in_process(name, tell))

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(names, pool.map(check, names), strict=True))


def _in_process(name: str, tell: Callable[[str], None]) -> Iterator[Row]:
    # What Triton's variables say of a user's runs (an interpreter, a debugger, dumps) is not meant
    # for these; where its cache is stays.
    kept = {"TRITON_CACHE_DIR", "TRITON_HOME"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_") or k in kept}
    # The parent may have been told where the package is by its own path.
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", __name__, name]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    reader.start()
    last = ""
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        if found["variant"] != last:
            last = found["variant"]
            tell(f"{name}: {last}")
        yield Row(**{**found, "violations": tuple(found["violations"])})
    code = process.wait()
    reader.join()
    if code:
        why = next((e.strip() for e in reversed(errors) if e.strip()), "")
        yield Row(name, "all", "", violations=(f"the process ended with {code}: {why}",))


def compile_kernels(name: str, chosen: Iterable[Variant]) -> Iterator[Row]:
    """Yields a row for each kernel that the variants start on the target `name`.

    Only for a process of its own: Triton takes the target for the GPU of this process from now on.
    """
    from .ops.kernels.target import Target, assuming, compiling

    _pretend(name)
    target = Target.parse(name)
    seen: set[str] = set()
    for variant in chosen:
        rows: list[Row] = []

        def take(
            kernel: Any,
            grid: tuple[int, ...],
            args: tuple[Any, ...],
            constants: dict[str, Any],
            variant: Variant = variant,
            rows: list[Row] = rows,
        ) -> None:
            compiled = kernel.warmup(*args, grid=grid, **constants)
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                rows.append(_row(target, variant, kernel.__name__, compiled, constants))

        try:
            with assuming(target), compiling(take):
                call(variant)
        except Exception as error:  # whatever a compiler may raise is what is asked for
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = f"does not compile: {type(error).__name__}: {said[-1] if said else ''}"
            rows.append(Row(name, variant.name, variant.operation, violations=(why,)))
        yield from rows


def _pretend(name: str) -> None:
    """Triton then compiles for the GPU `name`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    if name.startswith("sm_"):
        target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", name, 64)

    class Driver(DriverBase):  # type: ignore[misc]
        """As much of a driver as a compilation asks for."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return target

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())


def _row(target: Any, variant: Variant, kernel: str, compiled: Any, constants: Any) -> Row:
    found = read(compiled.asm)
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    programs = _programs(target, found.registers, warps, shared)
    bytes_read = variant.bytes_per_token * constants.get("TILE", 0)
    per_kib = found.loop * warps / (bytes_read / 1024) if found.loop and bytes_read else None
    reads = kernel in ("_decode", "_extend")
    return Row(
        target.name, variant.name, kernel.strip("_"), warps, found.registers, found.spills, shared,
        programs, found.loop, found.wide_bytes, found.byte_loads, found.conversions,
        None if per_kib is None else round(per_kib, 1),
        tuple(violations(target, variant, found, shared, programs, bytes_read / warps, reads)),
    )  # fmt: skip


def _programs(target: Any, registers: int, warps: int, shared: int) -> int:
    """Returns how many programs fit on a processor: by registers, threads and shared memory."""
    device = TARGETS[target.name]
    if target.is_nvidia:
        # 64 K registers, given out to warps by eight per thread.
        by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
        return min(
            by_registers,
            device.threads // (32 * warps),
            device.shared_in_all // (shared + RESERVED),
        )
    # Four units, each with 512 registers per lane for its warps, at most eight.
    per_unit = min(8, 512 // (-(-max(registers, 1) // 8) * 8))
    return min(per_unit * 4 // warps, device.shared_in_all // max(shared, 1))


def violations(
    target: Any,
    variant: Variant,
    found: Assembly,
    shared: int,
    programs: int,
    bytes_per_warp: float,
    reads: bool,
) -> Iterator[str]:
    """Yields each rule that a kernel breaks.

    Args:
        target: the GPU.
        variant: what was compiled.
        found: its machine code.
        shared: bytes of shared memory.
        programs: how many fit on a processor.
        bytes_per_warp: bytes of K and V that a warp's share of a tile is.
        reads: whether it is a kernel with a main loop over pages.
    """
    from .ops.kernels.tuning import programs_per_processor

    if found.spills:
        yield f"{found.spills} spills"
    if shared > TARGETS[target.name].shared:
        yield f"{shared} bytes of shared memory, there are {TARGETS[target.name].shared}"
    if found.doubles:
        yield f"{found.doubles} float64 instructions"
    if not reads:
        return
    if not found.loop:
        yield "no main loop"
        return
    # A page smaller than a tile is read token by token.
    lanes = 32 if target.is_nvidia else 64
    if variant.page >= 64 and found.wide_bytes * lanes < bytes_per_warp:
        yield f"{found.wide_bytes * lanes} of {bytes_per_warp:.0f} bytes in 16-byte loads"
    if found.byte_loads:
        yield f"{found.byte_loads} loads of single bytes from shared memory"
    native = "fp8_e4m3fnuz" if target.arch == "gfx942" else "fp8_e4m3"
    if native in (variant.k, variant.v) and target.converts(native) and not found.conversions:
        yield "no native conversion"
    if variant.main and variant.operation == "decode" and programs < programs_per_processor(target):
        yield f"{programs} programs fit on a processor, of {programs_per_processor(target)}"


def tables(found: dict[str, list[Row]]) -> "list[RenderableType]":
    """Returns a table per target as a person reads it."""
    from rich.table import Table
    from rich.text import Text

    columns = ("kernel", "variant", "registers", "spills", "shared", "programs", "16-byte",
               "conversions", "per KiB", "verdict")  # fmt: skip
    made: list[RenderableType] = []
    for name, rows in found.items():
        table = Table(title=name, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            cells = (row.kernel, row.variant, row.registers, row.spills, row.shared, row.programs,
                     row.wide_bytes // 16 if row.loop else "", row.conversions if row.loop else "",
                     row.per_kib or "", "; ".join(row.violations) or "ok")  # fmt: skip
            table.add_row(*(Text(str(cell)) for cell in cells))
        made.append(table)
    return made


def main(name: str) -> None:
    """Writes a line of JSON per row: what a process of `check_targets` does."""
    for row in compile_kernels(name, variants()):
        sys.stdout.write(json.dumps(asdict(row)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
