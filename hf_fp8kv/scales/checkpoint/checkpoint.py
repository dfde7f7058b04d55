"""Checkpoint: which tensors lie in which files, and what the configs beside them declare."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import ScaleError
from ...utils.files import read_weight_map
from .config import Config, Declaration
from .folder import Folder
from .tensor_names import LIKELY, ScaleTensor, TensorName, match_tensors

INDEX_FILE = "model.safetensors.index.json"
# A checkpoint in one file needs an index for a second one, and with an index no file may have the
# name of the only one: readers would stop there.
ONLY_FILE, FIRST_FILE = "model.safetensors", "model-00001-of-00001.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder, and the names that the formats give to tensors and files."""

    folder: Folder
    config: Config  # its config.json; empty when there is none
    declaration: Declaration
    tensor_names: Sequence[TensorName]
    own_files: Sequence[str]  # those that the formats keep scales in, apart from the weights
    left_out: Collection[str] = ()  # tensors that are not part of it
    # The files of tensors that are part of it, though its index does not name them.
    not_indexed: Mapping[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return self.folder.origin

    @cached_property
    def indexed_files(self) -> dict[str, str]:
        """The tensors of the only file, or of the index; empty when there is neither."""
        names = self.folder.header(ONLY_FILE)
        if names is not None:
            return dict.fromkeys(names, ONLY_FILE)
        for index in (INDEX_FILE, *self.folder.list_files(".safetensors.index.json")):
            path = self.folder.path(index)
            if path is not None:
                return read_weight_map(path)
        return {}

    @cached_property
    def files(self) -> dict[str, str]:
        """The file of each tensor; the order of preference is that of transformers."""
        files = {**self._find_files(), **self.not_indexed}
        return {name: file for name, file in files.items() if name not in self.left_out}

    def _find_files(self) -> dict[str, str]:
        if self.indexed_files:
            return self.indexed_files
        shards = self.folder.list_files(".safetensors")
        # The same weights in another layout, beside the ordinary ones.
        ordinary = [name for name in shards if not name.startswith("consolidated")]
        files: dict[str, str] = {}
        for shard in ordinary or shards:
            for name in self.folder.header(shard) or ():
                if name in files and LIKELY.search(name):
                    raise ScaleError(
                        f"{self.origin}: expected {name} in one file, got it in {files[name]} and "
                        f"{shard}; name one of them with from_file"
                    )
                files[name] = shard
        return files

    @cached_property
    def scale_tensors(self) -> list[ScaleTensor]:
        """The scales among its tensors, the best name first."""
        return match_tensors(self.files, self.tensor_names, self.declaration)[0]
