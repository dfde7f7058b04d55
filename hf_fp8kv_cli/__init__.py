"""The command line `hf-fp8kv`, a package next to `hf_fp8kv`. Only this package prints.

Each command imports `hf_fp8kv` and torch in its function, so help, completion and invalid command
lines need neither (0.4 s instead of 7 s).

Exit codes: 0 for success, 1 for an error explained on stderr, 2 for an invalid command line, 130
for an interruption. If the reader of a pipe closes it (`hf-fp8kv ... | head`), the exit code is 1
and no error is printed.
"""

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from . import calibrate, capacity, card, check, convert, generate, inspect, serve

__all__ = ["NAME", "app", "main"]

NAME = "hf-fp8kv"

app = typer.Typer(
    name=NAME,
    help="An 8-bit paged KV cache for Hugging Face transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    generate.demo,
    generate.generate,
    card.card,
    calibrate.calibrate,
    inspect.inspect,
    convert.convert,
    check.check,
    capacity.capacity,
    serve.serve,
):
    app.command()(command)


def main() -> None:
    """Run the command line and exit. Expected errors are printed as messages, with exit code 1."""
    try:
        try:
            # `python -m` needs the same name, because shell completion derives a variable from it.
            app(prog_name=NAME)
        finally:
            # Flush here, because Python prints a traceback if it finds a closed pipe when it exits.
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except SystemExit as exit_error:
        if exit_error.code == 130:  # Typer's exit code for an interruption
            print(f"{NAME}: interrupted", file=sys.stderr)
        raise
    except Exception as error:
        import torch

        from hf_fp8kv.errors import FP8KVError

        if not isinstance(error, (FP8KVError, OSError, torch.OutOfMemoryError)):
            raise
        message = f"{NAME}: error: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            message = (
                f"{NAME}: error: out of device memory: {error}. Reduce --max-length or "
                "--batch-size, or choose another --device"
            )
        print(message, file=sys.stderr)
        sys.exit(1)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print(metadata.version(NAME))
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass
