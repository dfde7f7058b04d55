"""Checkpoint: which tensors lie in which files, and what the configs beside them declare."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...errors import ScaleError
from ...utils.files import read_weight_map
from .config import Config
from .declaration import Declaration
from .folder import Folder
from .tensor_names import LIKELY

INDEX_FILE = "model.safetensors.index.json"
# A checkpoint in one file needs an index for a second one, and with an index no file may have the
# name of the only one: readers would stop there.
ONLY_FILE, FIRST_FILE = "model.safetensors", "model-00001-of-00001.safetensors"
# The files of formats that keep scales apart from weights, in the order in which they are read.
OWN_FILE, JSON_FILE = "kv_scales.safetensors", "kv_cache_scales.json"
# Its folder next to weights: servers load every safetensors file next to them as more weights, but
# none in a folder there.
OWN_FOLDER = "kv_scales"
# The file of formats whose scales are tensors of the checkpoint.
SCALES_FILE = "model-kv-scales.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder."""

    folder: Folder
    config: Config  # its config.json; empty when there is none
    declaration: Declaration
    files: Mapping[str, str]  # the file of each tensor
    left_out: Collection[str] = ()  # tensors in its files that are not part of it

    @property
    def origin(self) -> str:
        return self.folder.origin


def find_indexed(folder: Folder) -> dict[str, str]:
    """Return the file of each tensor, by the only file or the index; empty without both.

    As transformers does, take these before `find_in_shards`.
    """
    names = folder.header(ONLY_FILE)
    if names is not None:
        return dict.fromkeys(names, ONLY_FILE)
    for index in (INDEX_FILE, *folder.list_files(".safetensors.index.json")):
        path = folder.path(index)
        if path is not None:
            return read_weight_map(path)
    return {}


def find_in_shards(folder: Folder) -> dict[str, str]:
    """Return the tensors of all files, without an index."""
    files: dict[str, str] = {}
    shards = folder.list_files(".safetensors")
    # The same weights in another layout, next to the ordinary ones.
    ordinary = [name for name in shards if not name.startswith("consolidated")]
    for shard in ordinary or shards:
        for name in folder.header(shard) or ():
            if name in files and LIKELY.search(name):
                raise ScaleError(
                    f"{folder.origin}: expected {name} in one file, got it in {files[name]} and "
                    f"{shard}; name one of them with from_file"
                )
            files[name] = shard
    return files


def find_added(folder: Folder) -> dict[str, str]:
    """Return the tensors in our file of scales, which an index need not name."""
    return dict.fromkeys(folder.header(SCALES_FILE) or (), SCALES_FILE)
