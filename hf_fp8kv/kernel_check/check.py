"""Every kernel compiled for every GPU that is supported, without one: `hf-fp8kv check --kernels`.

The functions that a cache calls are called on tensors on the CPU, and each kernel that they would
start is compiled for the target instead: so what is checked is what would run, with the same
constants, and with the alignment that Triton finds in the same arguments. assembly.py reads the
machine code, rules.py says what it must be.

One process compiles for one target: Triton 3.6 converts FP8 for every target the way that the
first one in a process needs. They are forks of one that has imported everything, compiled nothing.
Triton's own cache makes a second run quick; it goes by the kernels' source.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import IO, Any, TypeAlias

import torch

from ..utils.environment import make_environment
from .assembly import read_assembly
from .rules import TARGETS, find_violations
from .variants import Variant, call_variant, list_variants

Progress: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class Row:
    """One kernel that a variant starts, as compiled for one target; see Assembly for the rest.

    Attributes:
        shared: bytes of shared memory of a program.
        programs: how many programs fit on a processor.
        rows, tile: query rows of a program, and the tokens that a round of the main loop reads.
        per_kib: instructions of a warp per KiB of keys and values, in the main loop.
        per_tile: instructions of all warps of a program in a round of the main loop.
        in_flight: bytes of keys and values that the programs of a processor have under way at
            most while they compute.
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
    rows: int = 0
    tile: int = 0
    per_kib: float | None = None
    per_tile: int = 0
    in_flight: int = 0
    violations: tuple[str, ...] = ()


def check_targets(
    names: Sequence[str] = tuple(TARGETS),
    *,
    variants: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> dict[str, list[Row]]:
    """Return the rows of each target; two processes at a time.

    A process that fails is a row that says so. `variants`: names of those to compile; empty: all.
    `progress` is called with what was compiled, and the share that is done.
    """
    names = list(dict.fromkeys(names))
    of_each = len(list_variants(variants))
    done = 0
    lock = threading.Lock()

    def report_progress(row: str) -> None:
        nonlocal done
        with lock:
            done += 1
            progress(row, min(1.0, done / (of_each * len(names))))

    def check(some: list[str]) -> list[Row]:
        return list(_check_in_process(some, variants, report_progress))

    halves = [half for half in (names[0::2], names[1::2]) if half]
    with ThreadPoolExecutor(max_workers=2) as pool:
        rows = [row for found in pool.map(check, halves) for row in found]
    return {name: [row for row in rows if row.target == name] for name in names}


def _check_in_process(
    names: Sequence[str], variants: Sequence[str], on_row: Callable[[str], None]
) -> Iterator[Row]:
    command = [sys.executable, "-m", "hf_fp8kv.kernel_check.check", ",".join(names), *variants]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=make_environment()
        ) as process,
    ):
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            row = Row(**{**(fields := json.loads(line)), "violations": tuple(fields["violations"])})
            if (name := f"{row.target}: {row.variant}") != last:
                last = name
                on_row(name)
            yield row
        if code := process.wait():
            yield from (_failed_row(name, code, errors) for name in names)


def _failed_row(name: str, code: int, errors: IO[str]) -> Row:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    why = f"the process ended with {code}: {lines[-1] if lines else ''}"
    return Row(name, "all", "", violations=(why,))


def compile_kernels(name: str, chosen: Iterable[Variant]) -> Iterator[Row]:
    """Yield a row for each kernel that the variants start on the target `name`.

    Only for a process of its own: Triton takes the target for the GPU of this process from now on.
    """
    from ..ops.triton.target import Target

    set_target(name)
    target = Target.parse(name)
    seen: set[str] = set()
    for variant in chosen:
        try:
            for kernel, grid, args, constants in _list_launches(target, variant):
                compiled = kernel.warmup(*args, grid=grid, **constants)
                if compiled.hash not in seen:
                    seen.add(compiled.hash)
                    yield _row(target, variant, kernel.__name__, compiled, constants)
        except Exception as error:  # a compiler may raise anything, and the report is about it
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = f"does not compile: {type(error).__name__}: {lines[-1] if lines else ''}"
            yield Row(name, variant.name, variant.operation, violations=(why,))


def _list_launches(target: Any, variant: Variant) -> list[tuple[Any, ...]]:
    """Return the kernels that a variant starts on `target`, with what `launch` is given."""
    from ..ops.triton.target import assuming, compiling

    launches: list[tuple[Any, ...]] = []
    with assuming(target), compiling(lambda *launch: launches.append(launch)):
        call_variant(variant)
    return launches


def set_target(name: str) -> None:
    """Make Triton compile for the GPU `name` from now on."""
    import triton
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", name, 64)

    # As much of a driver as a compilation asks for.
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
    )
    triton.runtime.driver.set_active(driver)


def _row(target: Any, variant: Variant, kernel: str, compiled: Any, constants: Any) -> Row:
    found = read_assembly(compiled.asm)
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    programs = target.fit(found.registers, warps, shared)
    tile = constants.get("TILE", 0) if found.loop else 0
    bytes_read = variant.bytes_per_token * constants.get("TILE", 0)
    per_tile = found.loop * warps if tile else 0
    in_flight = round(found.ahead * bytes_read) * programs
    reads = kernel in ("_decode", "_extend") and variant.dtype != torch.float32
    wide = bytes_read
    if variant.has_few_codes_of_v:
        wide -= variant.dims[1] * constants.get("TILE", 0)
    broken = find_violations(target, variant, found, shared, programs, wide / warps, reads)
    return Row(
        target.name, variant.name, kernel.strip("_"), warps, found.registers, found.spills,
        shared, programs, found.loop, found.wide_bytes, found.byte_loads, found.conversions,
        constants.get("ROWS", 0), tile, round(per_tile * 1024 / bytes_read, 1) if tile else None,
        per_tile, in_flight, tuple(broken),
    )  # fmt: skip


def _write_rows(rows: Iterable[Row]) -> None:
    for row in rows:
        sys.stdout.write(json.dumps(asdict(row)) + "\n")
        sys.stdout.flush()


def _check_target(name: str, variants: Sequence[str], errors: int) -> None:
    os.dup2(errors, sys.stderr.fileno())
    _write_rows(compile_kernels(name, list_variants(variants)))


def main(names: str, *variants: str) -> None:
    """Write a line of JSON per row: what a process of `check_targets` does.

    `names`: targets, separated by commas, each of which gets a process of its own.
    """
    import triton  # noqa: F401 (once, before the processes part)

    for name in names.split(","):
        with tempfile.TemporaryFile("w+") as errors:
            process = multiprocessing.get_context("fork").Process(
                target=_check_target, args=(name, variants, errors.fileno())
            )
            process.start()
            process.join()
            if process.exitcode:
                _write_rows([_failed_row(name, process.exitcode, errors)])


if __name__ == "__main__":
    main(*sys.argv[1:])
