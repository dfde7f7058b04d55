"""Command line of the GPU benchmark: measure, or show a stored result."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from hf_fp8kv.ops import choose_backend
from hf_fp8kv_cli.shared import make_console, print_note

from .first import run_steps
from .report import format_tables
from .suite import SECTIONS, run_suite

# Maximum number of processes that compile. They share the memory of the device.
MAX_COMPILE_PROCESSES = 15


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark or its first steps, or read a result. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=210.0, help="time limit in seconds (default: 210)"
    )
    parser.add_argument(
        "--dry", action="store_true", help="run all sections on tiny shapes, on any machine"
    )
    parser.add_argument(
        "--short", action="store_true", help="measure fewer cases: those that --first measures"
    )
    parser.add_argument(
        "--rivals",
        type=Path,
        metavar="FOLDER",
        help="sources of vLLM and SGLang, whose Triton kernels --first measures",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--first",
        action="store_true",
        help="measure the most important cases first, for eight minutes",
    )
    modes.add_argument(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="NAME",
        help=f"sections. The ceilings always run (default: all): {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--from", dest="result_file", type=Path, metavar="JSON", help="show a result of --json"
    )
    parser.add_argument(
        "--json", type=Path, metavar="JSON", help="write each row as soon as it is measured"
    )
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.result_file is not None:
        result = json.loads(options.result_file.read_text())
        if result.get("suite") != "gpu":
            parser.error(f"--from: expected a file that --json wrote, got {options.result_file}")
    elif not options.dry and device == "cpu":
        parser.error("expected a CUDA or ROCm device. Pass --dry to run without one.")
    elif options.first:
        return run_steps(
            options.json or Path("build/gpu/first.jsonl"), options.rivals, is_dry=options.dry,
            report=print_note,
        )  # fmt: skip
    else:
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        backend = "triton" if device == "cuda" or is_interpreted else "torch"
        num_compile_processes = min(max((os.cpu_count() or 2) - 1, 1), MAX_COMPILE_PROCESSES)
        result = run_suite(
            device=device, backend=choose_backend(backend, torch.device(device)),
            is_dry=options.dry,
            is_short=options.short,
            sections=tuple(dict.fromkeys(["ceilings", *options.sections])),
            seconds=options.seconds, json_path=options.json, progress=print_note,
            num_processes=0 if options.dry else num_compile_processes,
        )  # fmt: skip
    make_console(piped_width=140).print(format_tables(result))
    return int(any("lost the device" in str(section["error"]) for section in result["sections"]))


if __name__ == "__main__":
    # The result's `command` contains this name.
    sys.argv[0] = "python -m benchmarks.gpu"
    code = main()
    sys.stdout.flush()
    # A normal exit would wait minutes for torch's compiler processes.
    os._exit(code)
