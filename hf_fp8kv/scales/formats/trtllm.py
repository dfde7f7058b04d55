"""The format "trtllm": checkpoints of TensorRT-LLM, one `rank{N}.safetensors` for each process."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...errors import ScaleError
from ...utils.text import format_list
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.config import Config, as_mapping
from ..checkpoint.read_tensors import read_tensors
from ..checkpoint.tensor_names import TensorName
from ..layer_scales import LayerScales, ScaleData
from ..request import Request, warn_of_differences
from .tensor_format import SCALES_FILE, TensorFormat

_RANK_FILE = re.compile(r"rank([0-9]{1,6})\.safetensors")


class TensorRT(TensorFormat):
    """TensorRT-LLM."""

    name = "trtllm"
    layers_path = "transformer.layers"
    no_checkpoint = "TensorRT-LLM converts the weights"
    tensor_names = tuple(
        TensorName(
            rf"(?P<side>{sides})_cache_scaling_factor",
            f"attention.{name}_cache_scaling_factor",
            priority,
            needs_declaration=True,
            shape=(1,),
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

    def files(self, scales: ScaleData, tp_size: int) -> dict[str, bytes]:
        files = super().files(scales, tp_size)
        return {"rank0.safetensors": files[SCALES_FILE], "config.json": files["config.json"]}

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        block = dict(as_mapping(config.get("quantization"))) or {"quant_algo": None}
        config["quantization"] = block | {"kv_cache_quant_algo": "FP8"}

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
    if len(parts) == 1:
        return parts[0]
    largest = {index: _largest(checkpoint, index, parts) for index in parts[0].layers}
    merged = replace(parts[0], layers=largest)
    numbers = [
        {index: tuple(x.item() for x in s.static) for index, s in part.layers.items()}
        for part in (merged, *parts)
    ]
    warn_of_differences(checkpoint.origin, numbers, len(files))
    return merged


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


def _largest(checkpoint: Checkpoint, index: int, parts: list[ScaleData]) -> LayerScales:
    layers = [part.layers[index] for part in parts if index in part.layers]
    if len(layers) < len(parts) or any(x.ndim for layer in layers for x in layer.static):
        raise ScaleError(
            f"{checkpoint.origin}: expected one number a side of layer {index} from every rank, "
            "got less or more; read one rank with tp_rank and tp_size"
        )
    k, v = (torch.stack([getattr(layer, side) for layer in layers]).max() for side in "kv")
    return LayerScales(k, v, source=layers[0].source)
