"""Functions that the commands share: loading a model, printing results, notes and warnings."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

DEMO_NAME = "SmolLM2-135M-Instruct (demo)"


def choose_device(text: str) -> str:
    """Return a device that torch can use. "auto" means a GPU if torch finds one, else the CPU."""
    import torch

    from hf_fp8kv.errors import ConfigError

    device = text
    if text == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()  # fails on "meta" as well, which has no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device: expected auto, cpu, cuda:1 or similar, got {text!r}, which is not "
            f"available: {reason}. Omit --device"
        ) from None
    return device


def load_model_and_tokenizer(name: str | None, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Return the model on a device, and its tokenizer. Without a name, load the demo model."""
    from transformers import AutoTokenizer

    from hf_fp8kv.errors import ConfigError

    model = load_model(name, device, dtype)
    folder = name or str(model.name_or_path)
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        message = f"cannot load the tokenizer of {folder!r}: {error}"
        if Path(folder).is_dir() and not any(Path(folder).glob("*token*")):
            message = f"expected a tokenizer in {folder}, got none. Save one with save_pretrained"
        raise ConfigError(message) from error


def load_model(name: str | None, device: str, dtype: str = "auto") -> Any:
    """Return the model on a device, without its tokenizer."""
    from transformers import AutoModelForCausalLM

    from hf_fp8kv import ConfigError, demo_model_path
    from hf_fp8kv.utils.files import check_model_name

    device = choose_device(device)
    folder = name or str(demo_model_path())
    check_model_name(folder)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a language model from {folder!r}: {error}") from error
    return model.to(device).eval()


def make_console(piped_width: int | None = None) -> Console:
    """Return a console on stdout.

    If stdout is not a terminal and COLUMNS is not set, its width is `piped_width`.
    """
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else piped_width)


def print_note(message: str) -> None:
    """Print a line on stderr, because stdout is only for results."""
    print(message, file=sys.stderr)


@contextmanager
def handle_log(handler: logging.Handler) -> Iterator[None]:
    """Pass the library's log messages of at least the handler's level to the handler."""
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
