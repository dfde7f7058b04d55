"""Functions that the commands share: loading a model, printing results, notes and warnings."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console, Group, RenderableType

from ..errors import ConfigError
from ..utils.demo_model import demo_model_path

DEMO = "SmolLM2-135M-Instruct (demo)"


def pick_device(device: str) -> str:
    """Return the device. "auto" is a GPU if this machine has one, otherwise the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(name: str | None, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Return a model on its device, and its tokenizer. None loads the demo model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = name or str(demo_model_path())
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a language model from {folder!r}: {error}") from error
    try:
        return model.to(pick_device(device)).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot use --device {device}: {error}") from error


def make_console(piped_width: int | None = None) -> Console:
    """Return stdout with the width of the terminal or COLUMNS, or `piped_width` for files."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else piped_width)


def print_parts(parts: Sequence[RenderableType], *, piped_width: int | None = None) -> None:
    """Print parts below each other, with the width of `make_console`."""
    make_console(piped_width).print(Group(*parts))


@contextmanager
def show_progress() -> Iterator[Callable[..., None]]:
    """Return a function that shows a message and the completed share on stderr."""
    console = Console(stderr=True)
    with console.status("") as status:

        def update(message: str, share: float | None = None) -> None:
            if console.is_terminal:
                status.update(message if share is None else f"{share:.0%} {message}")
            else:
                print_note(message)

        yield update


def print_note(message: str) -> None:
    """Print a line on stderr, so that a pipe only gets results."""
    print(message, file=sys.stderr)


@contextmanager
def handle_log(handler: logging.Handler) -> Iterator[None]:
    """Pass the library's log to a handler, starting at the handler's level."""
    library = logging.getLogger("hf_fp8kv")
    level = library.level
    library.addHandler(handler)
    library.setLevel(min(handler.level, library.getEffectiveLevel()))
    try:
        yield
    finally:
        library.removeHandler(handler)
        library.setLevel(level)


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
    try:
        with handle_log(handler := _Warnings()):
            yield handler.messages
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"expected enough device memory, got: {error}. Use a smaller --max-length or "
            "--batch-size, or a different --device"
        ) from error
