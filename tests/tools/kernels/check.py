"""Compile every kernel for every supported GPU, without a GPU, and check the machine code.

The functions that a cache calls run on tensors on the CPU, and each kernel that they would launch
is compiled for the target instead. The compiled kernels therefore have the constants and argument
alignments of real calls. assembly.py reads the machine code, and rules.py checks it.

Triton's cache (TRITON_CACHE_DIR) stores compiled kernels by their source.
"""

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget

from hf_fp8kv.ops.triton.codec import AS_IS
from hf_fp8kv.ops.triton.target import Target, assuming, recording

from .assembly import read_assembly
from .rules import find_violations
from .variants import Variant, call_variant, list_variants

# A kernel of a variant for one target: names, violations, and the properties from `make_row`.
Row: TypeAlias = dict[str, Any]


def check_targets(
    targets: Sequence[str], variant_names: Collection[str] = ()
) -> dict[str, list[Row]]:
    """Return the rows of each target, for the variants with these names or all variants.

    Two processes run at a time, each for one target, because Triton 3.6 converts FP8 for all
    targets of a process like for its first target. The processes are forks, because an import of
    torch and transformers takes seconds. A process that dies adds a row with a violation.
    """
    variants = list_variants(variant_names)
    fork = multiprocessing.get_context("fork")
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(targets), 2):
            paths = {target: Path(folder, target) for target in targets[start : start + 2]}
            processes = [fork.Process(target=_write_rows, args=(*item, variants))
                         for item in paths.items()]  # fmt: skip
            for process in processes:
                process.start()
            for process, (target, path) in zip(processes, paths.items(), strict=True):
                process.join()
                rows[target] = [json.loads(line) for line in path.read_text().splitlines()]
                print(f"{target}: {len(rows[target])} kernels", file=sys.stderr)
                if process.exitcode:
                    reason = f"the process ended with exit code {process.exitcode}"
                    rows[target].append(_make_failed_row(target, "", "", reason))
    return rows


def _write_rows(target: str, path: Path, variants: Iterable[Variant]) -> None:
    with path.open("w", buffering=1) as file:
        for row in compile_variants(target, variants):
            file.write(json.dumps(row) + "\n")


def compile_variants(target_name: str, variants: Iterable[Variant]) -> Iterator[Row]:
    """Yield a row for each kernel that the variants launch on a target.

    Afterwards, Triton compiles for this target in this process.
    """
    set_target(target_name)
    target = Target.parse(target_name)
    seen_hashes: set[str] = set()
    for variant in variants:
        try:
            with assuming(target), recording(dry_run=True) as recorded:
                call_variant(variant)
            for kernel, grid, args, constants, _ in recorded.launches:
                compiled = kernel.warmup(*args, grid=grid, **constants)
                if compiled.hash not in seen_hashes:
                    seen_hashes.add(compiled.hash)
                    yield make_row(target, variant, kernel.__name__, compiled, constants)
        except Exception as error:  # a compiler may raise any error, and the row reports it
            last_line = str(error).strip().rpartition("\n")[2]
            reason = f"does not compile: {type(error).__name__}: {last_line}"
            yield _make_failed_row(target_name, variant.name, variant.operation, reason)


def _make_failed_row(target: str, variant: str, kernel: str, reason: str) -> Row:
    return {"target": target, "variant": variant, "kernel": kernel, "violations": [reason]}


def set_target(name: str) -> None:
    """Make Triton compile for the GPU `name` in this process."""
    target = Target.parse(name)
    triton_target = GPUTarget(target.vendor, target.arch, 32 if target.is_nvidia else 64)
    # A compilation uses only these methods of a driver.
    driver = SimpleNamespace(
        get_current_target=lambda: triton_target,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
    )
    triton.runtime.driver.set_active(driver)


def make_row(target: Target, variant: Variant, kernel: str, compiled: Any, constants: Any) -> Row:
    """Return the properties of a compiled kernel: the fields of `Assembly`, names, and these keys:

    * rows: Number of query rows of a program.
    * tile: Number of tokens that a round of the main loop reads.
    * per_tile: Number of instructions of all warps in a round.
    * per_kib: Number of these instructions per KiB of keys and values.
    * programs: Number of programs that fit on one SM.
    * cycles: Predicted cycles of a round on an SM of sm_90 that runs a single program.
    """
    assembly = read_assembly(compiled.asm)
    num_warps = compiled.metadata.num_warps
    shared_bytes = compiled.metadata.shared
    num_programs = target.count_programs(assembly.registers, num_warps, shared_bytes)
    # The constants of `_combine` have no launch parameters.
    call = constants.get("CALL") if kernel != "_combine" else None
    tile_tokens = call.config.tile if call else constants.get("TILE", 0)
    reads_pages = kernel == "_attend" and variant.dtype != torch.float32
    reads_codes = reads_pages or kernel == "_widen_codes"
    codec = call.k_codec if call else constants.get("K_CODEC")
    violations = find_violations(
        target, variant, assembly, shared_bytes, num_warps, tile_tokens if reads_pages else 0,
        converts=reads_codes and getattr(codec, "method", None) != AS_IS.value,
    )  # fmt: skip
    tile = tile_tokens if assembly.loop_size else 0
    bytes_per_tile = variant.bytes_per_token * tile
    per_tile = assembly.loop_size * num_warps if tile else 0
    return {
        "target": target.name, "variant": variant.name, "kernel": kernel.strip("_"),
        "warps": num_warps, **asdict(assembly), "shared": shared_bytes, "programs": num_programs,
        "rows": call.config.rows if call else constants.get("ROWS", 0),
        "tile": tile, "per_kib": round(per_tile * 1024 / bytes_per_tile, 1) if tile else 0.0,
        "per_tile": per_tile, "cycles": round(assembly.cycles * num_warps),
        "violations": list(violations),
    }  # fmt: skip
