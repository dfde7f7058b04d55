"""The format "trtllm": checkpoints of TensorRT-LLM, one `rank{N}.safetensors` for each process."""

import re
from collections.abc import Mapping
from dataclasses import replace

from ...errors import ScaleError
from ...utils.text import format_list
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config import as_mapping
from ..checkpoint.read_tensors import read_tensors
from ..checkpoint.tensor_names import TensorName
from ..layer_scales import ScaleData
from ..request import Request, take_largest
from .tensor_format import TensorFormat

_RANK_FILE = re.compile(r"rank([0-9]{1,6})\.safetensors")


class TensorRT(TensorFormat):
    """TensorRT-LLM, whose scales are only read: nothing reads them without its weights."""

    name = "trtllm"
    is_written = False
    tensor_names = tuple(
        TensorName(
            rf"(?P<side>{sides})_cache_scaling_factor",
            f"attention.{name}_cache_scaling_factor",
            priority,
            needs_declaration=True,
        )
        for sides, name, priority in (("[kv]", "{side}", 5), ("kv", "kv", 6))
    )

    def recognizes(self, entry: str, method: str) -> bool:
        return entry == "quantization"

    def read(self, checkpoint: Checkpoint, request: Request) -> ScaleData | None:
        rank_files = {} if checkpoint.indexed_files else self._find_rank_files(checkpoint)
        if rank_files:
            return _read_ranks(checkpoint, rank_files, request)
        return super().read(checkpoint, request)

    def _find_rank_files(self, checkpoint: Checkpoint) -> dict[int, str]:
        """Return the files of the ranks; of a repository only where its config declares them."""
        listed = checkpoint.folder.list_files(".safetensors")
        files = {int(match[1]): name for name in listed if (match := _RANK_FILE.fullmatch(name))}
        while not listed and checkpoint.declaration.dialect == self.name:
            name = f"rank{len(files)}.safetensors"
            if checkpoint.folder.header(name) is None:
                break
            files[len(files)] = name
        return files


def _read_ranks(checkpoint: Checkpoint, files: Mapping[int, str], request: Request) -> ScaleData:
    """Return one rank's scales, or for one process the largest over the ranks."""
    _check_ranks(checkpoint, files)
    parts = []
    for rank in request.choose_ranks(checkpoint.origin, len(files)):
        names = checkpoint.folder.header(files[rank]) or ()
        parts.append(read_tensors(checkpoint, dict.fromkeys(names, files[rank]), request))
    largest = take_largest(checkpoint.origin, [part.layers for part in parts])
    return replace(parts[0], layers=dict(largest))


def _check_ranks(checkpoint: Checkpoint, files: Mapping[int, str]) -> None:
    if sorted(files) != list(range(len(files))):
        raise ScaleError(
            f"{checkpoint.origin}: expected the ranks 0 to {len(files) - 1}, got "
            f"{format_list(sorted(files))}; fetch the missing file"
        )
    for owner in (as_mapping(checkpoint.config.get("mapping")), checkpoint.config):
        # Each stage of a pipeline counts its layers from 0: which one is which is not written.
        if owner.get("pp_size") not in (None, 1):
            raise ScaleError(
                f"{checkpoint.origin}: expected one pipeline stage, got pp_size = "
                f"{owner['pp_size']!r}; convert the checkpoint without pipeline parallelism"
            )
        for entry in ("tp_size", "world_size", "tensor_parallel"):
            if owner.get(entry) not in (None, len(files)):
                raise ScaleError(
                    f"{checkpoint.origin}: expected the files of {owner[entry]!r} ranks ({entry} "
                    f"in config.json), got {len(files)}; fetch the missing files"
                )
