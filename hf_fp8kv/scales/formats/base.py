"""ScaleFormat: a format of static scales, what it holds, how it is read and how it is written."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config import Declaration
from ..checkpoint.tensor_names import TensorName
from ..layer_scales import Granularity
from ..request import Request
from ..scale_data import ScaleData


class ScaleFormat(ABC):
    """A format of static scales. What it cannot hold is reduced before it is written.

    Attributes:
        name: what `KVScales.format` says.
        tensor_names: what it calls the tensors of scales in a checkpoint.
        own_files: the files that hold nothing but its scales, the one that is read last.
        granularity: the finest scales that it holds.
        holds_centers: whether it holds centers of K.
        holds_both_sides: whether K and V have scales of their own.
        holds_ranks: whether it holds scales for each rank of a tensor-parallel model.
        for_servers: whether servers read it, which cache what this library does not in some models.
        no_checkpoint: why it cannot be written into a copy of a checkpoint; None: it can.
    """

    name: ClassVar[str]
    tensor_names: ClassVar[tuple[TensorName, ...]] = ()
    own_files: ClassVar[tuple[str, ...]] = ()
    granularity: ClassVar[Granularity] = "tensor"
    holds_centers: ClassVar[bool] = False
    holds_both_sides: ClassVar[bool] = True
    holds_ranks: ClassVar[bool] = False
    for_servers: ClassVar[bool] = True
    no_checkpoint: ClassVar[str | None] = None

    def recognizes(self, entry: str, method: str) -> bool:
        """Return whether a config's quantization entry is that of the format's own tool.

        Args:
            entry: its name, such as "quantization_config".
            method: its `quant_method`, in lower case; empty without one.
        """
        return False

    def parse_block(self, where: str, block: Mapping[str, object]) -> list[Declaration]:
        """Return what a quantization entry of a config declares in a way of this format alone."""
        return []

    def read_file(self, path: Path, request: Request) -> ScaleData | None:
        """Return the scales of one file; None if it is no file of this format's own."""
        return None

    def read(self, checkpoint: Checkpoint, request: Request) -> ScaleData | None:
        """Return the scales of a checkpoint; None if it has none in this format.

        Raises:
            ScaleError: it has some, and they cannot be used.
        """
        return None

    @abstractmethod
    def files(self, scales: ScaleData, tp_size: int) -> dict[str, bytes]:
        """Return the files of the scales alone; what is read first comes last.

        Args:
            scales: as `reduce_scales` returns them.
            tp_size: how many ranks they are for.
        """

    def checkpoint_files(
        self, scales: ScaleData, checkpoint: Checkpoint, tp_size: int
    ) -> dict[str, bytes]:
        """Return the files that a copy of a checkpoint has instead of its own, or beside them."""
        return self.files(scales, tp_size)

    def missing_facts(self, scales: ScaleData) -> list[str]:
        """Return what readers of the scales alone will miss, for people."""
        return []
