"""Shared parts of the commands: loading a model, printing results, notes and warnings."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..scales.kv_scales import KVScales

DEMO = "SmolLM2-135M-Instruct (demo)"


def load_model(name: str | None, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Return a model (None: the demo model), on its device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..utils.dense_copies import hide_progress_bars

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = find_model(name)
    try:
        with nullcontext() if folder == name else hide_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a language model from {folder!r}: {error}") from error
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot use --device {device}: {error}") from error


def find_model(name: str | None) -> str:
    """Return the folder of the demo model (None) or of a packaged one; other names as they are."""
    from ..utils.demo_model import demo_model_path
    from ..utils.packaged_models import PACKAGED, packaged_model_path

    if name is None:
        return str(demo_model_path())
    is_packaged = name in PACKAGED and not Path(name).exists()
    return str(packaged_model_path(name)) if is_packaged else name


def load_config(name: str) -> Any:
    """Return the config of a model: a folder, a repository on the Hub, a packaged model."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(find_model(name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config of {name!r}: {error}") from error


def print_parts(parts: "Sequence[RenderableType]", *, piped_width: int | None = None) -> None:
    """Print as wide as the terminal or COLUMNS; to a file or pipe, `piped_width` wide."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if has_width else piped_width)
    for part in parts:
        console.print(part)


@contextmanager
def show_progress() -> Iterator[Callable[..., None]]:
    """Show on stderr the messages given to the function, and the share that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("", total=None)

        def update(message: str, share: float | None = None) -> None:
            if not console.is_terminal:
                print(message, file=sys.stderr)
            elif share is None:
                bar.update(task, description=message)
            else:
                bar.update(task, description=message, total=1.0, completed=share)

        yield update


def print_note(message: str) -> None:
    """Print a line that is not a result on stderr, so that a pipe gets only results."""
    print(message, file=sys.stderr)


class _Warnings(logging.Handler):
    """Print each warning of the library once, and collect it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self.messages:
            self.messages.append(message)
            print_note(f"warning: {message}")


@contextmanager
def report_problems() -> Iterator[list[str]]:
    """Print and collect the library's warnings, and explain a lack of memory."""
    import torch

    library = logging.getLogger("hf_fp8kv")
    handler = _Warnings()
    library.addHandler(handler)
    try:
        yield handler.messages
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"expected enough device memory, got: {error}; use a smaller --max-length or "
            "--batch-size, or another --device"
        ) from error
    finally:
        library.removeHandler(handler)


def describe_scales(scales: "KVScales") -> dict[str, Any]:
    """Return what all layers have in common, as JSON values."""
    from ..formats import count_plans
    from ..scales import Granularity

    kinds = {layer.granularity for layer in scales.layers.values()}
    return {
        "format": scales.format,
        "origin": scales.origin,
        "model_type": scales.model_type,
        "num_layers": len(scales.layers),
        "granularity": "/".join(kind for kind in get_args(Granularity) if kind in kinds),
        "centered": scales.centered,
        "plan": None if scales.plan is None else count_plans(scales.plan),
        "weights_digest": scales.weights_digest,
    }
