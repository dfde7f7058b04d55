"""Run the sections of the GPU benchmark, each within a part of the time limit."""

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_fp8kv.utils.environment import describe_run

from . import attention, cached, ceilings, end_to_end, latent, rival_kernels, write
from .record import Record, Row, complete
from .shapes import FULL, SHORT, TINY, RunSizes, shorten_sizes
from .stage import Stage

Section = Callable[[Record, RunSizes, str], None]
# The most important sections come first, but compiled steps, which take long, follow latents.
SECTIONS: dict[str, Section] = {
    "ceilings": ceilings.measure,
    "decode": attention.measure_decode,
    "layer": cached.measure_layers,
    "write": write.measure,
    "extend": attention.measure_extend,
    "latent": latent.measure,
    "end to end": end_to_end.measure,
    "offloaded": end_to_end.measure_offloaded,
    "other kernels": rival_kernels.measure,
}
# Sections whose kernels are compiled before anything is measured.
COMPILED_SECTIONS = ("decode", "layer", "write", "extend", "latent")
# Maximum time for compilation, in seconds.
COMPILE_SECONDS = 60.0


def run_suite(
    *,
    device: str = "cuda",
    backend: str = "triton",
    is_dry: bool = False,
    is_short: bool = False,
    sections: Sequence[str] = tuple(SECTIONS),
    seconds: float = 210.0,
    num_processes: int = 0,
    json_path: Path | None = None,
    progress: Callable[[str], None] = lambda _message: None,
) -> dict[str, Any]:
    """Measure the sections, and return a result that can be written as JSON.

    Args:
        device: A CUDA or ROCm device. A dry run accepts any device.
        backend: The backend of the operations.
        is_dry: Whether to run all sections on tiny shapes, on any machine. Times mean nothing.
        is_short: Whether to run only the cases of `first`.
        sections: Names from `SECTIONS`, in the order in which they run.
        seconds: Total time limit in seconds. Rows that do not fit are recorded as skipped.
        num_processes: Number of processes that compile kernels first.
        json_path: JSON file that is rewritten after each row. None writes no file.
        progress: Function that is called with progress messages.

    Returns:
        The entries of `describe_run`, `settings`, `ceilings`, `sections` and `rows`. `seconds` is
        None for a section that did not run to its end or to an error.
    """
    stage = Stage(device, is_dry=is_dry)
    settings: dict[str, Any] = {
        "device": device, "backend": backend, "dry": is_dry, "short": is_short,
        "seconds": seconds,
    }  # fmt: skip
    section_results: list[dict[str, Any]] = [
        {"name": name, "seconds": None, "time_limit": 0.0, "error": None, "skipped": []}
        for name in sections
    ]
    result: dict[str, Any] = {
        **describe_run("gpu", **_describe_gpu(stage)), "settings": settings,
        "sections": section_results,
    }  # fmt: skip

    def save_result() -> None:
        if json_path is not None:
            # The previous file stays complete until the new file replaces it.
            temporary_file = json_path.with_name(f"{json_path.name}.new")
            temporary_file.write_text(json.dumps(complete(result), indent=1) + "\n")
            temporary_file.replace(json_path)

    record = Record(stage, progress, save_result)
    result["rows"] = record.rows
    sizes = SHORT if is_short else FULL
    if is_dry:
        sizes = replace(TINY, with_compiled=not is_short)
    deadline = time.perf_counter() + seconds
    save_result()
    if num_processes and not set(sections).isdisjoint(COMPILED_SECTIONS):
        progress("== compiling")
        settings["compiling"] = compiling = compile_kernels(
            device, backend, num_processes, min(COMPILE_SECONDS, seconds / 2), sections, sizes,
            is_dry=is_dry,
        )  # fmt: skip
        progress(f"compiled in {compiling['seconds']} s")
        save_result()
    for index, section_result in enumerate(section_results):
        # Later sections get the time that earlier sections did not use.
        weights = [sizes.time_weights[name] for name in sections[index:]]
        time_limit = (deadline - time.perf_counter()) * weights[0] / sum(weights)
        progress(f"== {section_result['name']}: up to {max(time_limit, 0):.0f} s")
        section_result |= {"time_limit": round(time_limit, 1), "skipped": record.begin(time_limit)}
        start = time.perf_counter()
        try:
            with torch.no_grad():
                SECTIONS[section_result["name"]](record, sizes, backend)
        except Exception as error:
            section_result["error"] = f"{type(error).__name__}: {error}"
        section_result["seconds"] = round(time.perf_counter() - start, 1)
        if stage.is_lost():
            section_result["error"] = section_result["error"] or "lost the device"
            progress("lost the device, so the run ends")
            save_result()
            break
        stage.free_memory()
        save_result()
    return complete(result)


def compile_kernels(
    device: str, backend: str, num_processes: int, max_seconds: float, sections: Sequence[str],
    sizes: RunSizes, *, is_dry: bool,
) -> dict[str, float]:  # fmt: skip
    """Fill Triton's cache on disk. Return `seconds`, `processes`, and how many `failed`.

    Each process runs a part of the rows, and is killed after `max_seconds` seconds.
    """
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=compile_shard, daemon=True,
            args=(device, backend, index, num_processes, sections, sizes, is_dry),
        )
        for index in range(num_processes)
    ]  # fmt: skip
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, start + max_seconds - time.perf_counter()))
        worker.kill()
        worker.join()
    return {
        "seconds": round(time.perf_counter() - start, 1), "processes": num_processes,
        "failed": sum(worker.exitcode != 0 for worker in workers),
    }  # fmt: skip


def compile_shard(
    device: str, backend: str, index: int, num_processes: int, sections: Sequence[str],
    sizes: RunSizes, is_dry: bool,
) -> list[Row]:  # fmt: skip
    """Run every `num_processes`-th row of `COMPILED_SECTIONS` once, and return these rows."""
    torch.set_num_threads(1)
    record = Record(Stage(device, is_dry=is_dry, is_compiling=True), shard=(index, num_processes))
    with torch.no_grad():
        for name in COMPILED_SECTIONS:
            if name in sections:
                SECTIONS[name](record, shorten_sizes(sizes), backend)
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
