"""What all stages of a calibration share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..formats import Format
from ..scales.layer_scales import Granularity
from .observe import Batch, Parts
from .state import State

__all__ = ["Job", "Options", "batches_of"]


@dataclass(frozen=True)
class Options:
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
        told: called with a stage, tokens that the model was run on, and whether in an earlier run.
    """

    model: PreTrainedModel
    layers: frozenset[int]
    state: State
    told: Callable[[str, int, bool], None]

    def without(self, scales: Collection[int]) -> tuple[int, ...]:
        """The layers that a cache must leave out, since there are scales for these only."""
        return tuple(sorted(self.layers.difference(scales)))

    def over(
        self, name: str, batches: Sequence[Batch], step: Callable[[Parts, Batch], Parts]
    ) -> Parts:
        """A fold over batches that tells of its tokens."""

        def after(batch: Batch, again: bool) -> None:
            self.told(name, batch.tokens, again)

        return self.state.fold(name, batches, step, after)

    def once(self, name: str, work: Callable[[], Parts]) -> Parts:
        """A fold over nothing but the work itself."""
        return self.state.fold(name, (None,), lambda parts, item: work())


def batches_of(windows: Sequence[torch.Tensor], size: int) -> list[Batch]:
    """The windows in batches of `size`, in their order."""
    return [Batch(tuple(windows[i : i + size])) for i in range(0, len(windows), size)]
