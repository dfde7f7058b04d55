"""Command line of the GPU benchmark: measure, or show a stored result."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from hf_fp8kv.ops import choose_backend

from .first import run_steps
from .report import format_tables
from .suite import SECTIONS, run_suite

# Maximum number of processes that compile. They share the memory of the device.
MAX_COMPILE_PROCESSES = 15
# Width of the tables in a file or a pipe.
TABLE_WIDTH = 140


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark or read a result, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--device", help="for example cuda:1 (default: cuda, or cpu in a dry run without a GPU)")
    add("--seconds", type=float, default=210.0, help="time limit in seconds (default: 210)")
    add("--dry", action="store_true", help="run all sections on tiny shapes, on any machine")
    add("--short", action="store_true", help="only measure the cases of --first")
    add("--rivals", type=Path, metavar="FOLDER",
        help="sources of vLLM and SGLang, whose Triton kernels --first measures")  # fmt: skip
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--first", action="store_true", help="eight minutes of steps (first.py)")
    names_help = f"sections besides the ceilings (default: all): {', '.join(SECTIONS)}"
    modes.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS),
        metavar="NAME", help=names_help)  # fmt: skip
    add("--from", dest="result_file", type=Path, metavar="JSON",
        help="show a result that --json wrote")  # fmt: skip
    add("--json", type=Path, metavar="JSON", help="write each row as soon as it is measured")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    device = options.device or ("cuda" if has_gpu else "cpu")
    if options.result_file is not None:
        result = json.loads(options.result_file.read_text())
        if result.get("suite") != "gpu":
            parser.error(f"--from: expected a file that --json wrote, got {options.result_file}")
    elif not options.dry and not (has_gpu and torch.device(device).type == "cuda"):
        parser.error("expected a CUDA or ROCm device. Pass --dry to run without one.")
    elif options.first:
        results = options.json or Path("build/gpu/first.jsonl")
        return run_steps(results, options.rivals, is_dry=options.dry, report=_print_progress)
    else:
        num_compile_processes = min(max((os.cpu_count() or 2) - 1, 1), MAX_COMPILE_PROCESSES)
        result = run_suite(
            device=device, backend=_choose_backend(device), is_dry=options.dry,
            is_short=options.short,
            sections=tuple(dict.fromkeys(["ceilings", *options.sections])),
            seconds=options.seconds, json_path=options.json, progress=_print_progress,
            num_processes=0 if options.dry else num_compile_processes,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(format_tables(result))
    return int(any("lost the device" in str(section["error"]) for section in result["sections"]))


def _choose_backend(device: str) -> str:
    """Return "triton", or "torch" on a CPU without Triton's interpreter."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    name = "triton" if device != "cpu" or is_interpreted else "torch"
    return choose_backend(name, torch.device(device))


def _print_progress(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    # The result's `command` contains this name.
    sys.argv[0] = "python -m benchmarks.gpu"
    code = main()
    sys.stdout.flush()
    # A normal exit would wait minutes for torch's compiler processes.
    os._exit(code)
