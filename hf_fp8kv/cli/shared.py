"""Functions that the commands share: loading a model, printing results, notes and warnings."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from ..errors import ConfigError
from ..utils.demo_model import demo_model_path

DEMO_NAME = "SmolLM2-135M-Instruct (demo)"


def load_model(name: str | None, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Return the model on a device, and its tokenizer. Without a name, load the demo model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = name or str(demo_model_path())
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a language model from {folder!r}: {error}") from error
    return model.to(device).eval(), tokenizer


def make_console(piped_width: int | None = None) -> Console:
    """Return a console on stdout. Without a terminal and COLUMNS, its width is `piped_width`."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else piped_width)


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current message on stderr."""
    console = Console(stderr=True)
    with console.status("") as status:
        yield status.update if console.is_terminal else print_note


def print_note(message: str) -> None:
    """Print a line on stderr, because stdout is only for results."""
    print(message, file=sys.stderr)


@contextmanager
def handle_log(handler: logging.Handler) -> Iterator[None]:
    """Pass messages of the library's log to a handler, from the handler's level on."""
    logger = logging.getLogger("hf_fp8kv")
    old_level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(handler.level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(old_level)


class WarningLog(logging.Handler):
    """A handler that prints each warning of the library once, and collects the messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self.messages:
            self.messages.append(message)
            print_note(f"warning: {message}")
