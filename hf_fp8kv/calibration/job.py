"""Job: the model, layers and state that all stages of a calibration share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..formats import Format
from ..scales.layer_scales import Granularity
from .observe import Batch, TensorDict
from .state import State


@dataclass(frozen=True)
class CalibrationOptions:
    """What a user chose of the scales to make, see `calibrate`."""

    granularity: Granularity
    fmt: Format
    margin: float
    center: bool


@dataclass(frozen=True)
class Job:
    """What all stages need.

    Attributes:
        model: in eval mode.
        layers: those that need scales.
        state: what was done before.
        on_progress: called with a stage, the tokens that the model was run on, and whether that
            was in an earlier run.
    """

    model: PreTrainedModel
    layers: frozenset[int]
    state: State
    on_progress: Callable[[str, int, bool], None]

    def layers_without(self, scales: Collection[int]) -> tuple[int, ...]:
        """Return the layers that a cache must leave out, since there are scales for these only."""
        return tuple(sorted(self.layers.difference(scales)))

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


def make_batches(windows: Sequence[torch.Tensor], size: int) -> list[Batch]:
    """Return the windows in batches of `size`, in their order."""
    return [Batch(tuple(windows[i : i + size])) for i in range(0, len(windows), size)]
