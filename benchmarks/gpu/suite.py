"""Run the sections of the GPU benchmark, each with a share of the time."""

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_fp8kv.utils.environment import describe_run

from . import (
    attention,
    cached,
    ceilings,
    end_to_end,
    experiments,
    latent,
    other_kernels,
    serving,
    write,
)
from .goals import Row
from .record import DeviceLost, Record, complete
from .shapes import FULL, TINY, Sizes, shorten
from .stage import Stage

Section = Callable[[Record, Sizes, str], None]
# The most important sections come first, but latents precede compiled steps, which take long.
SECTIONS: dict[str, Section] = {
    "ceilings": ceilings.measure,
    "decode": attention.measure_decode,
    "layer": cached.measure_layers,
    "write": write.measure,
    "extend": attention.measure_extend,
    "latent": latent.measure,
    "end to end": end_to_end.measure,
    "offloaded": end_to_end.measure_offloaded,
    "others": attention.measure_others,
    "other kernels": other_kernels.measure,
    "serving": serving.measure,
}
# Sections whose kernels are compiled before anything is measured.
COMPILED_SECTIONS = ("decode", "layer", "write", "extend", "latent", "others")
# Time limit of compilation in seconds.
COMPILE_SECONDS = 60.0
# Sections that are measured only on request.
ON_REQUEST: dict[str, Section] = {"experiments": experiments.measure}


def run_suite(
    *,
    device: str = "cuda",
    backend: str = "triton",
    dry: bool = False,
    sections: Sequence[str] = tuple(SECTIONS),
    seconds: float = 210.0,
    processes: int = 0,
    save: Path | None = None,
    progress: Callable[[str], None] = lambda _message: None,
) -> dict[str, Any]:
    """Measure the sections, and return the result, ready for JSON.

    Args:
        device: A CUDA or ROCm device. In a dry run any device.
        backend: The backend of the operations.
        dry: Whether to run everything on tiny shapes, on any machine.
        sections: Names from `SECTIONS` and `ON_REQUEST`, in this order.
        seconds: Time limit of all sections. Rows that it excludes are noted as skipped.
        processes: Number of processes that compile kernels first.
        save: File that is rewritten after each row.
        progress: Called with messages.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, `ceilings`, `sections`,
        `rows` and `goals`. A section that did not end has None as `seconds`.
    """
    stage, known = Stage(device, dry=dry), {**SECTIONS, **ON_REQUEST}
    settings: dict[str, Any] = {
        "device": device, "backend": backend, "dry": dry, "seconds": seconds,
    }  # fmt: skip
    parts: list[dict[str, Any]] = [
        {"name": name, "seconds": None, "share": 0.0, "error": None, "skipped": []}
        for name in sections
    ]
    result: dict[str, Any] = {
        **describe_run("gpu", **_describe_gpu(stage)), "settings": settings, "sections": parts,
    }  # fmt: skip

    def keep() -> None:
        if save is not None:
            # The previous file stays complete until the new one replaces it.
            new = save.with_name(f"{save.name}.new")
            new.write_text(json.dumps(complete(result), indent=1) + "\n")
            new.replace(save)

    record = Record(stage, progress, keep)
    result["rows"] = record.rows
    sizes, ends = TINY if dry else FULL, time.perf_counter() + seconds
    keep()
    if processes:
        progress("== compiling")
        limit = min(COMPILE_SECONDS, seconds / 2)
        settings["compiling"] = compiled = compile_kernels(device, backend, dry, processes, limit)
        progress(f"compiled in {compiled['seconds']} s")
        keep()
    for index, part in enumerate(parts):
        # Later sections get the time that a section does not need.
        weights = [sizes.seconds.get(name, 100.0) for name in sections[index:]]
        share = (ends - time.perf_counter()) * weights[0] / sum(weights)
        progress(f"== {part['name']}: up to {max(share, 0):.0f} s")
        part |= {"share": round(share, 1), "skipped": record.begin(share)}
        began = time.perf_counter()
        try:
            with torch.no_grad():
                known[part["name"]](record, sizes, backend)
        except DeviceLost as lost:
            part["error"] = str(lost)
        except Exception as failure:
            part["error"] = f"{type(failure).__name__}: {failure}"
        part["seconds"] = round(time.perf_counter() - began, 1)
        if stage.is_lost():
            part["error"] = part["error"] or "lost the device"
            progress("the device is lost, and the run ends")
            keep()
            break
        stage.clean()
        keep()
    return complete(result)


def compile_kernels(
    device: str, backend: str, dry: bool, processes: int, seconds: float
) -> dict[str, float]:
    """Fill Triton's cache on disk, and return the `seconds` and the number of `failed` processes.

    Each process runs its share of the rows, and is ended after `seconds`.
    """
    began, context = time.perf_counter(), multiprocessing.get_context("spawn")
    pool = [
        context.Process(
            target=compile_share, args=(device, backend, dry, index, processes), daemon=True
        )
        for index in range(processes)
    ]
    for process in pool:
        process.start()
    for process in pool:
        process.join(max(0.0, began + seconds - time.perf_counter()))
        process.kill()
    for process in pool:
        process.join()
    failed = sum(process.exitcode != 0 for process in pool)
    return {
        "seconds": round(time.perf_counter() - began, 1), "processes": processes, "failed": failed,
    }  # fmt: skip


def compile_share(device: str, backend: str, dry: bool, index: int, processes: int) -> list[Row]:
    """Run every `processes`-th row of `COMPILED_SECTIONS` once, and return these rows."""
    torch.set_num_threads(1)
    record = Record(Stage(device, dry=dry, compiling=True), share=(index, processes))
    with torch.no_grad():
        for name in COMPILED_SECTIONS:
            SECTIONS[name](record, shorten(TINY if dry else FULL), backend)
    return record.rows


def _describe_gpu(stage: Stage) -> dict[str, object]:
    if not stage.is_gpu:
        return {}
    properties = torch.cuda.get_device_properties(stage.device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": stage.cache_bytes,
        "cuda": torch.version.cuda or torch.version.hip,
    }
