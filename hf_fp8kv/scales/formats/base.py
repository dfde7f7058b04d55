"""ScaleFormat: a format of static scales, what it holds, how it is read and how it is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config import Declaration
from ..checkpoint.tensor_names import TensorName
from ..layer_scales import Granularity, ScaleData
from ..request import Request


class ScaleFormat:
    """A format of static scales. What it cannot hold is reduced before it is written."""

    name: ClassVar[str]
    quant_method: ClassVar[str] = ""  # of the quantization config that declares the scales
    tensor_names: ClassVar[tuple[TensorName, ...]] = ()
    own_files: ClassVar[tuple[str, ...]] = ()  # of nothing but scales; the one that is read last
    granularity: ClassVar[Granularity] = "tensor"  # the finest that it holds
    holds_centers: ClassVar[bool] = False
    holds_both_sides: ClassVar[bool] = True  # K and V have scales of their own
    holds_ranks: ClassVar[bool] = False  # scales for each rank of a tensor-parallel model
    is_written: ClassVar[bool] = True  # False: it is only read

    def recognizes(self, entry: str, method: str) -> bool:
        """Return whether an entry such as "quantization_config" is of the format's own tool.

        `method` is its `quant_method` in lower case; empty without one.
        """
        return bool(method) and method == self.quant_method

    def parse_block(self, where: str, block: Mapping[str, object]) -> list[Declaration]:
        """Return what a quantization entry of a config declares in a way of this format alone."""
        return []

    def remove_declaration(self, block: dict[str, object]) -> None:
        """Remove from a quantization entry what `declare` would not replace."""

    def read_file(self, path: Path, request: Request) -> ScaleData | None:
        """Return the scales of one file; None if it is no file of this format's own."""
        return None

    def read(self, checkpoint: Checkpoint, request: Request) -> ScaleData | None:
        """Return the scales of a checkpoint; None if it has none in this format."""
        return None

    def files(
        self, scales: ScaleData, tp_size: int = 1, checkpoint: Checkpoint | None = None
    ) -> dict[str, bytes]:
        """Return the files of scales that `reduce_scales` returned; the file read first comes last.

        With a checkpoint they are those that it has instead of its own, or next to them.
        """
        raise NotImplementedError(self.name)

    def missing_facts(self, scales: ScaleData) -> list[str]:
        """Return what readers of the scales alone will miss, for people."""
        return []
