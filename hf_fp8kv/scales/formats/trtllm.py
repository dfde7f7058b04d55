"""The checkpoints of TensorRT-LLM: one `rank{N}.safetensors` for each process."""

import logging
import re
from collections.abc import Mapping

import torch

from ...errors import ScaleError
from ...utils.text import format_list
from ..kv_scales import KVScales
from ..layer_scales import LayerScales
from .checkpoint_tensors import read_tensors
from .config import Declaration, as_mapping
from .folder import Folder
from .request import Request, ranks_to_take

__all__ = ["rank_files", "read_ranks"]

logger = logging.getLogger(__package__)

_RANK = re.compile(r"rank([0-9]{1,6})\.safetensors")


def rank_files(folder: Folder, declared: Declaration) -> dict[int, str]:
    """The files of the ranks; of a repository only where its config is one of TensorRT-LLM."""
    here = folder.others(".safetensors")
    found = {int(match[1]): name for name in here if (match := _RANK.fullmatch(name))}
    while not here and declared.dialect == "trtllm":
        name = f"rank{len(found)}.safetensors"
        if folder.header(name) is None:
            break
        found[len(found)] = name
    return found


def read_ranks(
    folder: Folder,
    ranks: Mapping[int, str],
    want: Request,
    declared: Declaration,
    config: dict[str, object],
) -> KVScales:
    """This rank's scales, or in one process the largest over the ranks: nothing overflows."""
    _check_ranks(folder, ranks, config)
    parts = []
    for rank in ranks_to_take(folder.origin, len(ranks), want):
        names = dict.fromkeys(folder.header(ranks[rank]) or (), ranks[rank])
        parts.append(read_tensors(folder, names, want, declared, config))
    merged = parts[0]
    if len(parts) > 1:
        layers = {index: _largest(folder, index, parts) for index in merged.layers}
        merged = KVScales(layers, merged.format, merged.model_type, merged.origin)
        if any(_numbers(part) != _numbers(merged) for part in parts):
            logger.warning("%s: the scales of its %d ranks differ: the largest one is used of each "
                           "layer", folder.origin, len(ranks))  # fmt: skip
    return merged


def _check_ranks(folder: Folder, ranks: Mapping[int, str], config: Mapping[str, object]) -> None:
    if sorted(ranks) != list(range(len(ranks))):
        raise ScaleError(
            f"{folder.origin}: expected the ranks 0 to {len(ranks) - 1}, got "
            f"{format_list(sorted(ranks))}; fetch the missing file"
        )
    mapping = as_mapping(config.get("mapping"))
    for owner in (mapping, config):
        # Each stage of a pipeline counts its layers from 0: which one is which is not written.
        if owner.get("pp_size") not in (None, 1):
            raise ScaleError(
                f"{folder.origin}: expected one pipeline stage, got pp_size = "
                f"{owner['pp_size']!r}; convert the checkpoint without pipeline parallelism"
            )
        for entry in ("tp_size", "world_size", "tensor_parallel"):
            if owner.get(entry) not in (None, len(ranks)):
                raise ScaleError(
                    f"{folder.origin}: expected the files of {owner[entry]!r} ranks ({entry} in "
                    f"config.json), got {len(ranks)}; fetch the missing files"
                )


def _largest(folder: Folder, index: int, parts: list[KVScales]) -> LayerScales:
    found = [part.layers[index] for part in parts if index in part.layers]
    if len(found) < len(parts) or any(s.k.ndim or s.v.ndim for s in found):
        raise ScaleError(
            f"{folder.origin}: expected one number a side of layer {index} from every rank, got "
            "less or more; read one rank with tp_rank and tp_size"
        )
    k, v = (torch.stack([getattr(s, side) for s in found]).max() for side in "kv")
    return LayerScales(k, v, source=found[0].source)


def _numbers(scales: KVScales) -> dict[int, tuple[float, float]]:
    return {index: (s.k.item(), s.v.item()) for index, s in scales.layers.items()}
