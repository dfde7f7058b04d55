"""Helpers for the benchmarks: command lines, progress, tables and separate processes."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType

from hf_fp8kv.errors import FP8KVError
from hf_fp8kv.utils.environment import describe_run
from hf_fp8kv.utils.terminal import build_table
from hf_fp8kv_cli.shared import load_model_and_tokenizer, make_console, print_note

Result = dict[str, Any]
# Keyword arguments of `argparse.ArgumentParser.add_argument` by the name of the option.
Options = Mapping[str, Mapping[str, Any]]
MODEL_OPTIONS: Options = {
    "--model": {"help": "A folder or a Hub id. Default: the demo model."},
    "--device": {"help": "Device of the model: auto, cpu, cuda, ..."},
}
TURNS_OPTION: Options = {"--turns": {"type": int, "help": "Number of turns."}}


def main(docstring: str | None, measure: Callable[..., Result], options: Options) -> None:
    """Read the command line, measure with a progress line, and show the result.

    A result has the keys of `describe_run` and of `measure`, and the arguments as `settings`.

    Args:
        docstring: Docstring whose first line describes the command.
        measure: Function that returns `rows`, and may return more keys. It takes the arguments
            and `progress`, a function that is called with the name of each measurement.
        options: Options of the command line.
    """
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    for name, keywords in options.items():
        parser.add_argument(name, **keywords)
    parser.add_argument("--json", metavar="PATH", help="Write JSON. - prints it instead.")
    arguments = {
        name: value for name, value in vars(parser.parse_args()).items() if value is not None
    }
    path: str | None = arguments.pop("json", None)
    if path is not None and not Path(path).parent.is_dir():
        parser.error(f"--json: expected a file in an existing folder, got {path!r}")
    run = describe_run(Path(sys.argv[0]).stem)
    console = Console(stderr=True)
    try:
        with console.status("") as status:
            progress = status.update if console.is_terminal else print_note
            result = {**run, "settings": arguments, **measure(**arguments, progress=progress)}
    except FP8KVError as error:
        sys.exit(f"error: {error}")
    if path == "-":
        sys.stdout.write(f"{json.dumps(result)}\n")
        return
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
    make_console(piped_width=140).print(format_rows(result))


def load_model_before(measure: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that takes `MODEL_OPTIONS`, and passes a float32 model to `measure`."""

    def load_and_measure(
        model: str | None = None, device: str = "auto", **arguments: Any
    ) -> Result:
        loaded_model, tokenizer = load_model_and_tokenizer(model, device, "float32")
        return measure(loaded_model, tokenizer, **arguments)

    return load_and_measure


def compute_quartiles(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the median, and the first and third quartiles, which are None for a single value."""
    if len(values) == 1:
        return values[0], None, None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), low, high


def format_rows(result: Result) -> RenderableType:
    """Return a table of the rows, without lists, and the conditions of the run."""
    columns = dict.fromkeys(
        name
        for row in result["rows"] for name, value in row.items()
        if not isinstance(value, list | None)
    )  # fmt: skip
    table_rows = [[_format_cell(row.get(name)) for name in columns] for row in result["rows"]]
    notes = [f"{name}: {result[name]}" for name in ("suite", "settings", "date", "commit", "idle")]
    return Group(
        build_table(dict.fromkeys(columns, "left"), table_rows),
        *notes,
        f"cpu: {result['hardware']['cpu']}",
    )


def _format_cell(value: object) -> str:
    if isinstance(value, list | None):
        return ""
    if isinstance(value, tuple):  # a mean and its interval
        return "{:.3g} [{:.3g}, {:.3g}]".format(*value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def make_environment() -> dict[str, str]:
    """Return the environment variables of a process that compiles kernels."""
    # Triton's variables (interpreter, debugger, dumps) are for other runs, except its cache.
    variables = {
        name: value for name, value in os.environ.items()
        if not name.startswith("TRITON_") or name in ("TRITON_CACHE_DIR", "TRITON_HOME")
    }  # fmt: skip
    # The new process must find the package where this process found it.
    return {**variables, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}


def exchange_line(process: "subprocess.Popen[str]", line: str = "") -> Any:
    """Send a line to a process, unless it is empty, and parse the next line of its output as JSON.

    Raises:
        RuntimeError: The process ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line and f"{line}\n")
    process.stdin.flush()
    if not (reply := process.stdout.readline()):
        raise RuntimeError(f"a process ended with exit code {process.wait()}: {process.args!r}")
    return json.loads(reply)


def run_process(target: str, task: object, environment: Mapping[str, str]) -> Any:
    """Call the function `target` in a separate process, and return its result.

    `target` is "module:function". Its argument `task` and its result are passed as JSON.

    Raises:
        RuntimeError: The process failed.
    """
    module, _, function = target.partition(":")
    script = (
        f"import json, sys; from {module} import {function}\n"
        f"print(json.dumps({function}(json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", script, json.dumps(task)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        raise RuntimeError(
            f"a process ended with exit code {process.returncode}: {process.stderr[-2000:]}"
        )
    return json.loads(process.stdout.splitlines()[-1])
