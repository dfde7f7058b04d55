"""GPU suite: the sections, each with its share of the time."""

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_fp8kv.errors import ConfigError
from hf_fp8kv.utils.environment import describe_run

from . import (
    cached,
    ceilings,
    decode,
    end_to_end,
    experiments,
    latent,
    other_kernels,
    serving,
    write,
)
from .record import DeviceLost, Record
from .results import complete
from .shapes import FULL, TINY, Sizes
from .timing import Stage

Section = Callable[[Record, Sizes, str], None]
# name -> what measures it; first those that goals are about. The last may have to wait for nvcc.
SECTIONS: dict[str, Section] = {
    "ceilings": lambda record, sizes, backend: ceilings.measure(record, backend),
    "decode": decode.measure,
    "layer": cached.measure_layers,
    "end to end": end_to_end.measure,
    "offloaded": end_to_end.measure_offloaded,
    "latent": latent.measure,
    "others": decode.measure_others,
    "write": write.measure,
    "extend": decode.measure_extend,
    "serving": serving.measure,
    "other kernels": other_kernels.measure,
}
# Sections that are measured only when asked for.
MORE: dict[str, Section] = {"experiments": experiments.measure}


def run_gpu_suite(
    *,
    progress: Callable[[str], None] | None = None,
    device: str = "cuda",
    backend: str = "triton",
    dry: bool = False,
    sections: Sequence[str] | None = None,
    seconds: float = 255.0,
    save: Path | None = None,
) -> dict[str, Any]:
    """Return what was measured, ready for JSON.

    Args:
        progress: called with what is measured next.
        device, backend: a CUDA or ROCm device and "triton"; in a dry run any.
        dry: tiny shapes and a clock: everything runs, on any machine, and nothing is measured.
        sections: which of `SECTIONS` and "experiments", in their order; None: all of `SECTIONS`.
        seconds: for all of them; what there is no time for is noted as skipped.
        save: a file that the result is written to whenever there is more of it.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, `ceilings`, `sections`,
        `rows` and `goals`.

    Raises:
        ConfigError: there is no such device or section.
    """
    known = {**SECTIONS, **MORE}
    chosen = list(SECTIONS if sections is None else sections)
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"sections: expected some of {', '.join(known)}, got {unknown}")
    stage, has_gpu = Stage(device, dry=dry), torch.cuda.is_available()
    if not dry and not (stage.is_gpu and has_gpu):
        raise ConfigError(
            f"the suite 'gpu' expected a CUDA or ROCm device, got {device!r}, and torch "
            f"{'finds one' if has_gpu else 'finds none'}"
        )
    result: dict[str, Any] = {
        **describe_run("gpu", **_describe_gpu(stage)),
        "settings": {
            "device": str(stage.device), "backend": backend, "dry": dry, "seconds": seconds
        },
        "sections": [], "rows": [], "banned": [],
    }  # fmt: skip
    return continue_suite(result, chosen, seconds, progress or (lambda _message: None), save)


def continue_suite(
    result: dict[str, Any],
    chosen: Sequence[str],
    seconds: float,
    progress: Callable[[str], None],
    save: Path | None,
) -> dict[str, Any]:
    """Add sections to `result`, and return it."""
    settings = result["settings"]
    stage = Stage(settings["device"], dry=settings["dry"])
    sizes, known = TINY if stage.dry else FULL, {**SECTIONS, **MORE}
    ends = time.perf_counter() + seconds
    # Known before they begin: a run that is ended in the middle leaves a file that names them.
    sections = [_describe_section(name) for name in chosen]
    result["sections"] += sections

    def keep() -> None:
        if save is not None:
            # In the place of the file before, which is whole until then.
            new = save.with_name(f"{save.name}.new")
            new.write_text(json.dumps(complete(result), indent=1) + "\n")
            new.replace(save)

    record = Record(
        stage, progress=progress, keep=keep, rows=result["rows"], banned=result["banned"]
    )
    keep()
    for index, (name, section) in enumerate(zip(chosen, sections, strict=True)):
        # What one section does not need goes to those after it.
        shares = [sizes.seconds.get(other, 100.0) for other in chosen[index:]]
        share = (ends - time.perf_counter()) * shares[0] / sum(shares)
        progress(f"== {name}: up to {max(share, 0):.0f} s")
        section |= {"share": round(share, 1), "skipped": record.begin(share)}
        began, error, again = time.perf_counter(), None, False
        try:
            with torch.no_grad():
                known[name](record, sizes, settings["backend"])
        except DeviceLost as lost:
            error, again = f"lost the device: {lost}", True
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        section |= {"seconds": round(time.perf_counter() - began, 1), "error": error}
        if again or stage.is_lost():
            # A new process gets the device back. It repeats the section without the contender that
            # lost the device, if it is known which.
            remaining = chosen[index if again else index + 1 :]
            del result["sections"][len(result["sections"]) - len(chosen) + index + 1 :]
            progress("the device is lost to this process: another one goes on")
            return _continue_elsewhere(result, remaining, ends - time.perf_counter(), save)
        stage.clean()
        keep()
    return complete(result)


def _describe_section(name: str) -> dict[str, Any]:
    """Return a section that has not ended: `seconds` is None as long as it has not."""
    return {"name": name, "seconds": None, "share": 0.0, "error": None, "skipped": []}


def _continue_elsewhere(
    result: dict[str, Any], chosen: Sequence[str], seconds: float, save: Path | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        path.write_text(json.dumps([result, chosen, seconds, save and str(save)]))
        script = f"import sys; from {__name__} import _resume; _resume(sys.argv[1])"
        command = [sys.executable, "-c", script, str(path)]
        try:
            subprocess.run(
                command, check=True, text=True, capture_output=True, timeout=max(seconds, 1.0) + 10
            )
            return dict(json.loads(path.read_text()))
        except subprocess.SubprocessError as failure:
            error = f"{failure}: {str(getattr(failure, 'stderr', ''))[-2000:]}"
    # What it wrote before it ended counts.
    result = json.loads(save.read_text()) if save is not None else result
    unfinished = [s["name"] for s in result["sections"] if s["seconds"] is None]
    result["sections"] += [_describe_section(name) for name in chosen if name not in unfinished]
    result["sections"] += [{**_describe_section("another process"), "seconds": 0.0, "error": error}]
    return complete(result)


def _resume(task: str) -> None:
    """Continue in another process: read the task, and write the result in its place."""
    path = Path(task)
    result, chosen, seconds, save = json.loads(path.read_text())
    report = functools.partial(print, file=sys.stderr)
    save = None if save is None else Path(save)
    path.write_text(json.dumps(continue_suite(result, chosen, seconds, report, save)))


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
