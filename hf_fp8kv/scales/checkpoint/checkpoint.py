"""Checkpoints in local folders and on the Hub: their files, tensors and configs."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    SafetensorsParsingError,
)

from ...errors import ScaleError
from ...utils.files import read_header, read_json, read_weight_map
from .configs import HF_QUANT_CONFIG, Config, Declaration, find_declaration
from .tensor_names import LIKELY_SCALE

INDEX_FILE = "model.safetensors.index.json"
# A checkpoint with a second file needs an index. The first file is then renamed, because readers
# ignore an index next to a file with the name `ONLY_FILE`.
ONLY_FILE, FIRST_FILE = "model.safetensors", "model-00001-of-00001.safetensors"
# The files of formats with separate scales, in the order in which they are read.
OWN_FILE, JSON_FILE = "kv_scales.safetensors", "kv_cache_scales.json"
# Folder of `OWN_FILE` next to weights. Servers load every safetensors file next to weights as
# further weights, but not files in a folder.
OWN_FOLDER = "kv_scales"
# The file of formats whose scales are tensors of the checkpoint.
SCALES_FILE = "model-kv-scales.safetensors"
# The base class of HfHubHTTPError is the base error of the Hub client's HTTP library.
_HUB_ERRORS: tuple[type[Exception], ...]
_HUB_ERRORS = (*HfHubHTTPError.__bases__, OSError, ValueError, SafetensorsParsingError)


@dataclass(frozen=True)
class LocalFolder:
    root: Path
    target: Path | None = None  # future folder of the files, for messages

    @property
    def origin(self) -> str:
        """Name of the folder for messages."""
        return str(self.target or self.root)

    def find_file(self, name: str) -> Path | None:
        """Return the path of a file, or None if it does not exist."""
        path = self.root / name
        return path if path.is_file() else None

    def list_tensors(self, name: str) -> list[str] | None:
        """Return the tensor names of a safetensors file, or None if there is no such file."""
        path = self.find_file(name)
        return None if path is None else read_header(path)[0]

    def list_files(self, suffix: str) -> list[str]:
        """Return the names of files with this suffix. A repository lists none."""
        return sorted(path.name for path in self.root.glob(f"*{suffix}"))


class HubOptions(TypedDict, total=False):
    """Version of a repository, and options of fetching it, as in transformers."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool
    subfolder: str | None


@contextmanager
def translate_hub_errors(repo: str, verb: str) -> Iterator[None]:
    """Convert all errors of the Hub's client to ScaleError. `verb` is "read" or "written"."""
    try:
        yield
    except _HUB_ERRORS as error:
        if isinstance(error, ScaleError):
            raise
        raise ScaleError(
            f"{repo}: expected a repository that can be {verb}, got {type(error).__name__}: "
            f"{error}. Check the name, the revision and the token"
        ) from error


@dataclass
class HubFolder:
    """A repository of the Hub. Only small files and files with scales are fetched."""

    repo: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    force_download: bool = False
    subfolder: str | None = None
    # Set when a request has failed. Only cached files are read then, although more may exist.
    failure: str = field(default="", init=False)
    paths: dict[str, Path | None] = field(default_factory=dict, init=False)

    @property
    def offline(self) -> bool:
        return self.local_files_only or constants.HF_HUB_OFFLINE or bool(self.failure)

    @property
    def origin(self) -> str:
        return f"{self.repo} ({self.failure})" if self.failure else self.repo

    def find_file(self, name: str) -> Path | None:
        if name not in self.paths:
            self.paths[name] = None
            with self._ignore_missing():
                path = hf_hub_download(
                    self.repo, name, subfolder=self.subfolder, revision=self.revision,
                    token=self.token, cache_dir=self.cache_dir, local_files_only=self.offline,
                    force_download=self.force_download and not self.offline,
                )  # fmt: skip
                self.paths[name] = Path(path)
        return self.paths[name]

    def list_tensors(self, name: str) -> list[str] | None:
        file = f"{self.subfolder}/{name}" if self.subfolder else name
        with self._ignore_missing():
            cached = try_to_load_from_cache(self.repo, file, self.cache_dir, self.revision)
            if isinstance(cached, str) and not self.force_download:
                return read_header(Path(cached))[0]
            if not self.offline:
                # This request fetches some kilobytes instead of the complete file.
                metadata = HfApi().parse_safetensors_file_metadata(
                    self.repo, file, revision=self.revision, token=self.token
                )
                return list(metadata.tensors)
        return None

    def list_files(self, suffix: str) -> list[str]:
        return []

    @contextmanager
    def _ignore_missing(self) -> Iterator[None]:
        """Ignore a file that does not exist, or is not cached if the Hub cannot be reached."""
        with translate_hub_errors(self.repo, "read"):
            try:
                yield
            except EntryNotFoundError as error:
                if isinstance(error, LocalEntryNotFoundError) and not self.failure:
                    self.failure = (
                        "offline: cached files only" if self.offline else "Hub unreachable"
                    )


Folder = LocalFolder | HubFolder


@dataclass(frozen=True)
class Checkpoint:
    """The configs of a checkpoint, and the file of each tensor."""

    folder: Folder
    config: Config  # its config.json, empty without one
    modelopt: Config | None  # its hf_quant_config.json
    files: Mapping[str, str]  # the file of each tensor
    removed_tensors: Collection[str] = ()  # tensors in its files that are not part of it

    @property
    def origin(self) -> str:
        return self.folder.origin

    @cached_property
    def declaration(self) -> Declaration:
        return find_declaration(self.config, self.modelopt)


def read_configs(folder: Folder) -> Checkpoint:
    """Return a checkpoint with its configs, and without tensors."""
    path, modelopt_path = folder.find_file("config.json"), folder.find_file(HF_QUANT_CONFIG)
    config = {} if path is None else read_json(path, unique=False)
    modelopt = None if modelopt_path is None else read_json(modelopt_path, unique=False)
    return Checkpoint(folder, config, modelopt, {})


def find_indexed_tensors(folder: Folder) -> dict[str, str]:
    """Return the file of each tensor, from `ONLY_FILE` or an index, or {} if neither exists.

    transformers also prefers these to `find_shard_tensors`.
    """
    names = folder.list_tensors(ONLY_FILE)
    if names is not None:
        return dict.fromkeys(names, ONLY_FILE)
    for index in (INDEX_FILE, *folder.list_files(".safetensors.index.json")):
        path = folder.find_file(index)
        if path is not None:
            return read_weight_map(path)
    return {}


def find_shard_tensors(folder: Folder) -> dict[str, str]:
    """Return the file of each tensor, read from the headers of all safetensors files."""
    files: dict[str, str] = {}
    shards = folder.list_files(".safetensors")
    # "consolidated" files are a copy of the weights in a different layout.
    weight_shards = [name for name in shards if not name.startswith("consolidated")]
    for shard in weight_shards or shards:
        for name in folder.list_tensors(shard) or ():
            if name in files and LIKELY_SCALE.search(name):
                raise ScaleError(
                    f"{folder.origin}: expected {name} in one file, got it in {files[name]} and "
                    f"{shard}. Pass one of them to from_file"
                )
            files[name] = shard
    return files
