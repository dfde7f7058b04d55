"""The command line, `hf-fp8kv`; the only package that prints.

A file is one command. Exit codes: 0 when it worked, 1 for an error that the message on stderr
explains, 2 for a command line that cannot be understood, 130 when it was interrupted. A reader that
goes away (`hf-fp8kv ... | head`) ends it with 1 and no message.
"""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import Fp8KVError
from ..utils.environment import version
from . import bench, calibrate, check, convert, generate, inspect, serve

__all__ = ["NAME", "app", "main"]

NAME = "hf-fp8kv"


class _Commands(TyperGroup):
    """The commands; an interruption is one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            print(": ".join(filter(None, [NAME, "interrupted", str(error)])), file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name=NAME,
    cls=_Commands,
    help="An FP8 paged KV cache for Hugging Face transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("calibrate")(calibrate.calibrate)
app.command("inspect")(inspect.inspect)
app.command("convert")(convert.convert)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("serve", cls=serve.Serve)(serve.serve)


def main() -> None:
    """Runs the command line and exits; an error of ours is one message and exit code 1."""
    try:
        try:
            # The name, also of `python -m`: the shell's variable for completion goes by it.
            app(prog_name=NAME)
        finally:
            # Here and not when Python ends, where a reader that has gone away is a traceback.
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (Fp8KVError, OSError) as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version(NAME))
        raise typer.Exit


@app.callback()
def _options(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass
