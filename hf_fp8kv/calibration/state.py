"""State of a calibration: what it has done so far, and a file from which a killed one resumes.

All the work is a row of folds: over some items, in a fixed order, each adds to a dict of tensors.
The file holds the dict of every fold and how many items it has taken, whole at any time.
"""

import glob
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors import safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from ..errors import ConfigError, ScaleError
from ..utils.files import convert_read_errors, write_all
from .choose import CalibrationOptions
from .observe import Batch, TensorDict

_Item = TypeVar("_Item")
_VERSION = "1"
# Writing the file costs little, but not nothing.
_SECONDS = 2.0


class State:
    """The folds of one calibration, kept in memory, and in a file where one is named."""

    def __init__(self, path: Path | None, identity: str) -> None:
        """Read the file if it is there; `identity` is a digest of all the result depends on."""
        self.path, self.identity = path, identity
        self.folds: dict[str, TensorDict] = {}
        self.done: dict[str, int] = {}
        self._before = 0.0
        self._started = self._saved = time.monotonic()
        if path is None:
            return
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(f"state: expected a file in a folder that exists, got {path}")
        _remove_abandoned(path)
        if path.exists():
            self._read(path)

    @property
    def seconds(self) -> float:
        """The time of all runs, but for what a killed one had not saved."""
        return self._before + time.monotonic() - self._started

    def fold(
        self,
        name: str,
        items: Sequence[_Item],
        step: Callable[[TensorDict, _Item], TensorDict],
        on_item: Callable[[_Item, bool], None] = lambda item, resumed: None,
    ) -> TensorDict:
        """Return what the items add up to; those that the file has are not gone through again.

        `step` returns the tensors that follow from those so far (at first none) and an item;
        `on_item` is called after each item, with True if an earlier run has done it.
        """
        tensors, done = self.folds.get(name, {}), self.done.get(name, 0)
        for number, item in enumerate(items):
            if number >= done:
                tensors = step(tensors, item)
                self.folds[name], self.done[name] = tensors, number + 1
                self._save(last=number + 1 == len(items))
            on_item(item, number < done)
        return tensors

    def drop(self, name: str) -> None:
        """Forget a fold: what was made of it is in another one."""
        self.folds.pop(name, None)
        self.done.pop(name, None)

    def _save(self, *, last: bool) -> None:
        if self.path is None or not (last or time.monotonic() - self._saved > _SECONDS):
            return
        tensors = {
            f"{fold}/{name}": tensor.detach().cpu().contiguous()
            for fold, of_fold in self.folds.items()
            for name, tensor in of_fold.items()
        }
        done = json.dumps({"folds": self.done, "seconds": self.seconds})
        about = {"hf_fp8kv_state": _VERSION, "of": self.identity, "done": done}
        try:
            write_all({self.path: save(tensors, about)})
        except OSError as error:
            raise ConfigError(
                f"state: expected a file that can be written, got {error}; name another"
            ) from error
        self._saved = time.monotonic()

    def _read(self, path: Path) -> None:
        try:
            with (
                convert_read_errors(path, "the state of a calibration"),
                safe_open(path, "pt") as file,
            ):
                about = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except ScaleError as error:
            raise ConfigError(f"state: {error}, or delete it to start anew") from error
        if about.get("hf_fp8kv_state") != _VERSION or "done" not in about:
            raise ConfigError(
                f"state: expected the state of a calibration, got another file, {path}; name a "
                "file that is not there yet"
            )
        if about.get("of") != self.identity:
            raise ConfigError(
                f"state: expected the state of this calibration, got {path} of one with another "
                "model, other texts, options or versions; repeat those, or delete it to start anew"
            )
        try:
            done = json.loads(about["done"])
            self.done = {str(name): int(count) for name, count in done["folds"].items()}
            self._before = float(done["seconds"])
            self.folds = {name: {} for name in self.done}
            for name, tensor in tensors.items():
                fold, part = name.split("/", 1)
                self.folds[fold][part] = tensor
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"state: expected the state of a calibration in {path}, got a damaged one "
                f"({type(error).__name__}: {error}); delete it to start anew"
            ) from error


@dataclass(frozen=True)
class Job:
    """What all stages need: a model in eval mode, the layers that need scales, and the state."""

    model: PreTrainedModel
    layers: frozenset[int]
    options: CalibrationOptions
    state: State
    # Called with a stage, the tokens that were run, and whether that was in an earlier run.
    on_progress: Callable[[str, int, bool], None]

    def run_batches(
        self, name: str, batches: Sequence[Batch], step: Callable[[TensorDict, Batch], TensorDict]
    ) -> TensorDict:
        """Fold a step over batches, and report their tokens."""

        def on_batch(batch: Batch, resumed: bool) -> None:
            self.on_progress(name, batch.tokens, resumed)

        return self.state.fold(name, batches, step, on_batch)

    def run_once(self, name: str, work: Callable[[], TensorDict]) -> TensorDict:
        """Do the work, unless an earlier run has done it, and return its result."""
        return self.state.fold(name, (None,), lambda tensors, item: work())


def _remove_abandoned(path: Path) -> None:
    """Remove what runs left that were killed in the middle of a write."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        number = part.name.split(".")[-2].partition("-")[0]
        try:
            os.kill(int(number), 0)
        except ValueError:
            continue
        except ProcessLookupError:
            part.unlink(missing_ok=True)
        except OSError:
            continue  # it runs
