"""Dense copies: models that packages contain as GGUF files, as folders that load in a second.

A copy in bf16 is made once, in the user's cache folder, and then loads like any other model folder.
"""

import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigError

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# The steps of a conversion, and the percentage of the time that each takes.
_STEPS = {"reading the weights": 80, "reading the tokenizer": 14, "saving": 4, "checking": 2}
# A temporary folder this old was left behind by a conversion that was killed.
_ABANDONED_SECONDS = 3600.0


def cache_folder() -> Path:
    """Return the folder of converted models; it follows the Hub cache's environment variables."""
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hf_fp8kv"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hf_fp8kv"


def make_copy(
    name: str, get_source: Callable[[Path], Path], *, install: str, progress: bool
) -> Path:
    """Return the folder with a model as bf16 safetensors, and its tokenizer.

    The first call converts the model; later calls only check that it is there. The folder gets its
    name when it is complete, so an interrupted conversion is never mistaken for a model, and of two
    processes that convert at the same time one keeps its copy.

    Args:
        name: of the folder.
        get_source: returns the GGUF file; it may put it into the temporary folder that it is given.
        install: what to run if the reader of GGUF files is not installed.
        progress: whether to draw a progress bar.

    Raises:
        ConfigError: the package `gguf` is not installed.
        OSError: the cache folder cannot be written.
    """
    folder = cache_folder() / name
    if _is_complete(folder):
        return folder
    if find_spec("gguf") is None:
        raise ConfigError(
            f"expected the package gguf, which reads the model {name}; run: {install}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
        source = get_source(Path(temporary))
        copy = Path(temporary) / "copy"
        copy.mkdir()
        _convert(source, copy, name, progress=progress)
        _publish(copy, folder)
    return folder


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Turn transformers' progress bars off for a while."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _publish(copy: Path, folder: Path) -> None:
    """Rename `copy` to `folder`, unless another process has put a complete model there."""
    if folder.exists() and not _is_complete(folder):
        shutil.rmtree(folder)
    try:
        copy.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise


def _convert(source: Path, folder: Path, name: str, *, progress: bool) -> None:
    """Write a dense bf16 copy of `source` to `folder`, with tokenizer and chat template."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _steps(name, progress) as steps, hide_progress_bars():
        next(steps)
        # The progress bar of transformers' GGUF reader cannot be turned off and would break up the
        # one drawn here; it writes to whatever stderr is when it starts.
        with redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                # Without it the weights stay in 4-bit blocks, which cannot be saved.
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
        next(steps)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        next(steps)
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # not an OSError, whatever is wrong with the disk
            raise OSError(
                f"cannot write {name} to {folder.parent.parent}: {error}; make room, or set "
                "HF_HOME to a folder with room"
            ) from error
        tokenizer.save_pretrained(folder)
        next(steps)
        AutoTokenizer.from_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
        if not _is_complete(folder):
            raise ConfigError(f"expected {', '.join(_FILES)} in {folder}; report this as a bug")


@contextmanager
def _steps(name: str, progress: bool) -> Iterator[Iterator[str]]:
    """Draw a progress bar on stderr; each `next()` of the iterator begins the next step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    if progress and not console.is_terminal:  # the bar is drawn only on a terminal
        console.print(f"Converting {name} once, to {cache_folder() / name} (20 s to a minute)")
    columns = (
        SpinnerColumn(),
        TextColumn(f"Converting {name}, once: {{task.description}}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
    )
    quiet = not progress or not console.is_terminal
    with Progress(*columns, console=console, disable=quiet) as bar:
        task = bar.add_task("", total=sum(_STEPS.values()))

        def advance() -> Iterator[str]:
            done = 0
            for step, share in _STEPS.items():
                bar.update(task, description=step, completed=done)
                yield step
                done += share

        yield advance()
        bar.update(task, description="done", completed=sum(_STEPS.values()))
