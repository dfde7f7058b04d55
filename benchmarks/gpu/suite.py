"""All sections of the GPU benchmark, each with a share of the time."""

import json
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
from .record import DeviceLost, Record, complete
from .shapes import FULL, TINY, Sizes
from .stage import Stage

Section = Callable[[Record, Sizes, str], None]
# The sections that goals are about come first. The last one may have to wait for nvcc.
SECTIONS: dict[str, Section] = {
    "ceilings": ceilings.measure,
    "decode": attention.measure_decode,
    "layer": cached.measure_layers,
    "end to end": end_to_end.measure,
    "offloaded": end_to_end.measure_offloaded,
    "latent": latent.measure,
    "others": attention.measure_others,
    "write": write.measure,
    "extend": attention.measure_extend,
    "serving": serving.measure,
    "other kernels": other_kernels.measure,
}
# Sections that are measured only on request.
MORE: dict[str, Section] = {"experiments": experiments.measure}


def run_suite(
    *,
    device: str = "cuda",
    backend: str = "triton",
    dry: bool = False,
    sections: Sequence[str] = tuple(SECTIONS),
    seconds: float = 255.0,
    save: Path | None = None,
    progress: Callable[[str], None] = lambda _message: None,
) -> dict[str, Any]:
    """Measure the sections, and return the result, ready for JSON.

    Args:
        device: A CUDA or ROCm device. In a dry run any device.
        backend: The backend of the operations.
        dry: Whether to run everything on tiny shapes, on any machine.
        sections: Names from `SECTIONS` and `MORE`, in this order.
        seconds: Time limit of all sections. Rows that it excludes are noted as skipped.
        save: File that is rewritten after each row.
        progress: Called with messages.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, `ceilings`, `sections`,
        `rows` and `goals`. A section that did not end has None as `seconds`.
    """
    stage, known = Stage(device, dry=dry), {**SECTIONS, **MORE}
    settings = {"device": device, "backend": backend, "dry": dry, "seconds": seconds}
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
    for index, part in enumerate(parts):
        # A section leaves the time that it does not need to later ones.
        shares = [sizes.seconds.get(other, 100.0) for other in sections[index:]]
        share = (ends - time.perf_counter()) * shares[0] / sum(shares)
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
