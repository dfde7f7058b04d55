"""What a user gives as scales, and what a config says of them, before anything is read."""

import os
from pathlib import Path

from ..errors import ScaleError
from .kv_scales import KVScales
from .validation import checked_constant

__all__ = ["declared_kv_scales", "resolve"]


def resolve(
    scales: KVScales | str | os.PathLike[str] | float | None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    subfolder: str | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    strict: bool = True,
) -> KVScales | float | None:
    """What the argument `scales` of a cache stands for.

    None is dynamic scales, a number is that constant for every layer, a string or path is a file,
    a folder or a repository of the Hub, and the other arguments are those of
    `KVScales.from_pretrained`.

    Raises:
        ScaleError: for anything else, or whatever is wrong with the file.
    """
    if scales is None or isinstance(scales, KVScales):
        return scales
    if isinstance(scales, int | float):
        return checked_constant(scales, "scales")
    if not isinstance(scales, str | os.PathLike):
        raise ScaleError(
            "scales: expected None, a number, KVScales, a path or a repository id, got "
            f"{type(scales).__name__}"
        )
    path = Path(scales)
    if path.is_file() or (path.suffix in (".json", ".safetensors") and not path.is_dir()):
        return KVScales.from_file(path, tp_rank=tp_rank, tp_size=tp_size, strict=strict)
    return KVScales.from_pretrained(
        scales,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        force_download=force_download,
        subfolder=subfolder,
        tp_rank=tp_rank,
        tp_size=tp_size,
        strict=strict,
    )


def declared_kv_scales(config: object) -> str | None:
    """A short description, when a config says that its checkpoint holds static FP8 KV scales.

    Args:
        config: transformers' config, or the dict of a `config.json`.
    """
    from .formats import declaration

    found = declaration(config)
    return found.what if found.kind == "static" else None
