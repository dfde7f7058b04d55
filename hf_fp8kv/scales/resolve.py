"""Resolving the argument `scales` of a cache, before anything is read."""

import os
from pathlib import Path
from typing import Unpack

from ..errors import ScaleError
from .checkpoint.folder import HubOptions
from .kv_scales import KVScales
from .validation import check_constant


def resolve(
    scales: KVScales | str | os.PathLike[str] | float | None,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    strict: bool = True,
    **hub_options: Unpack[HubOptions],
) -> KVScales | float | None:
    """Return what the argument `scales` of a cache stands for.

    None is dynamic scales, a number is that constant for every layer, a string or path is a file,
    a folder or a repository of the Hub, and the other arguments are those of
    `KVScales.from_pretrained`.

    Raises:
        ScaleError: for anything else, or whatever is wrong with the file.
    """
    if scales is None or isinstance(scales, KVScales):
        return scales
    if isinstance(scales, int | float):
        return check_constant(scales, "scales")
    if not isinstance(scales, str | os.PathLike):
        raise ScaleError(
            "scales: expected None, a number, KVScales, a path or a repository id, got "
            f"{type(scales).__name__}"
        )
    path = Path(scales)
    if path.is_file() or (path.suffix in (".json", ".safetensors") and not path.is_dir()):
        return KVScales.from_file(path, tp_rank=tp_rank, tp_size=tp_size, strict=strict)
    return KVScales.from_pretrained(
        scales, tp_rank=tp_rank, tp_size=tp_size, strict=strict, **hub_options
    )
