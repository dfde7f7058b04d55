"""ScaleFormat: a format of static scales, what it holds, how it is read and how it is written."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config import Declaration
from ..checkpoint.tensor_names import TensorName
from ..layer_scales import Granularity, ScaleData
from ..request import Request


class ScaleFormat(ABC):
    """A format of static scales. What it cannot hold is reduced before it is written."""

    name: ClassVar[str]
    tensor_names: ClassVar[tuple[TensorName, ...]] = ()
    own_files: ClassVar[tuple[str, ...]] = ()  # of nothing but scales; the one that is read last
    granularity: ClassVar[Granularity] = "tensor"  # the finest that it holds
    holds_centers: ClassVar[bool] = False
    holds_both_sides: ClassVar[bool] = True  # K and V have scales of their own
    holds_ranks: ClassVar[bool] = False  # scales for each rank of a tensor-parallel model
    for_servers: ClassVar[bool] = True  # which cache what this library does not in some models
    no_checkpoint: ClassVar[str | None] = None  # why it is not for copies of a checkpoint

    def recognizes(self, entry: str, method: str) -> bool:
        """Return whether an entry such as "quantization_config" is of the format's own tool.

        `method` is its `quant_method` in lower case; empty without one.
        """
        return False

    def parse_block(self, where: str, block: Mapping[str, object]) -> list[Declaration]:
        """Return what a quantization entry of a config declares in a way of this format alone."""
        return []

    def remove_declaration(self, block: dict[str, object]) -> None:  # noqa: B027
        """Remove from a quantization entry what `declare` would not replace."""

    def read_file(self, path: Path, request: Request) -> ScaleData | None:
        """Return the scales of one file; None if it is no file of this format's own."""
        return None

    def read(self, checkpoint: Checkpoint, request: Request) -> ScaleData | None:
        """Return the scales of a checkpoint; None if it has none in this format."""
        return None

    @abstractmethod
    def files(self, scales: ScaleData, tp_size: int) -> dict[str, bytes]:
        """Return the files of what `reduce_scales` returned; what is read first comes last."""

    def checkpoint_files(
        self, scales: ScaleData, checkpoint: Checkpoint, tp_size: int
    ) -> dict[str, bytes]:
        """Return the files that a copy of a checkpoint has instead of its own, or beside them."""
        return self.files(scales, tp_size)

    def missing_facts(self, scales: ScaleData) -> list[str]:
        """Return what readers of the scales alone will miss, for people."""
        return []
