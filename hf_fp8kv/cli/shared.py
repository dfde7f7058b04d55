"""What the commands share: a model, and all that they print."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ScaleError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..scales.kv_scales import KVScales

__all__ = ["DEMO", "facts", "load", "load_config", "progress", "show", "spoken", "tell"]

DEMO = "SmolLM2-135M-Instruct (demo)"

# The library's messages name arguments; on a command line they are options.
_OPTIONS = {
    "overwrite=True": "--overwrite",
    "strict=False": "--lenient",
    "weights='copy'": "--weights copy",
    "save_pretrained(checkpoint=)": "hf-fp8kv convert --checkpoint",
    "pass checkpoint=": "pass --checkpoint",
}


def load(name: str | None, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Returns the model (None: the demo's), on its device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..utils import demo_model as demo

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = name or str(demo.model_path())
    try:
        with nullcontext() if name else demo.hide_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a language model from {folder!r}: {error}") from error
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot use --device {device}: {error}") from error


def load_config(name: str) -> Any:
    """Returns the config of a model: of a folder or a repository of the Hub."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config of {name!r}: {error}") from error


def show(parts: "Sequence[RenderableType]", *, piped_width: int | None = None) -> None:
    """Prints as wide as the terminal or COLUMNS is; into a file or pipe, `piped_width` wide."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if known else piped_width)
    for part in parts:
        console.print(part)


@contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Inside, the value tells on stderr what is next, and which share is done where it is known."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("", total=None)

        def say(message: str, share: float | None = None) -> None:
            if not console.is_terminal:
                print(message, file=sys.stderr)
            elif share is None:
                bar.update(task, description=message)
            else:
                bar.update(task, description=message, total=1.0, completed=share)

        yield say


def tell(message: str) -> None:
    """Prints a line that is no result: on stderr, so that a pipe gets only results."""
    print(message, file=sys.stderr)


class _Warnings(logging.Handler):
    """Tells each warning of the library once, and keeps it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = _in_options(record.getMessage())
        if message not in self.told:
            self.told.append(message)
            tell(f"warning: {message}")


@contextmanager
def spoken() -> Iterator[list[str]]:
    """Inside, what the library says is for a command line; the value collects its warnings."""
    import torch

    library = logging.getLogger("hf_fp8kv")
    handler = _Warnings()
    library.addHandler(handler)
    try:
        yield handler.told
    except (ScaleError, ConfigError) as error:
        raise type(error)(_in_options(str(error))) from error
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"expected a device with more memory: {error}; use a smaller --max-length or "
            "--batch-size, or another --device"
        ) from error
    finally:
        library.removeHandler(handler)


def _in_options(message: str) -> str:
    for argument, option in _OPTIONS.items():
        message = message.replace(argument, option)
    return message


def facts(scales: "KVScales") -> dict[str, Any]:
    """Returns what is true of all layers, as JSON values."""
    kinds = {layer.granularity for layer in scales.layers.values()}
    return {
        "format": scales.format,
        "origin": scales.origin,
        "model_type": scales.model_type,
        "num_layers": len(scales.layers),
        "granularity": "/".join(kind for kind in ("tensor", "head", "channel") if kind in kinds),
        "centered": scales.centered,
    }
