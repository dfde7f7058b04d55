"""Checkpoints in local folders and on the Hub: their files, tensors and configs."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    SafetensorsParsingError,
)

from ...errors import ScaleError
from ...utils.files import read_header, read_json, read_weight_map
from ...utils.text import format_value
from .configs import HF_QUANT_CONFIG, Config, Declaration, find_declaration
from .tensor_names import LIKELY_SCALE_PATTERN

INDEX_FILE = "model.safetensors.index.json"
# A checkpoint with a second file needs an index. The first file is then renamed to `FIRST_FILE`,
# because readers ignore an index next to a file with the name `SINGLE_FILE`.
SINGLE_FILE = "model.safetensors"
FIRST_FILE = "model-00001-of-00001.safetensors"
# Files that contain only scales, in the order in which they are read.
KV_FILE = "kv_scales.safetensors"
JSON_FILE = "kv_cache_scales.json"
# Folder of `KV_FILE` in a folder with weights. Servers load every safetensors file next to weights
# as additional weights, but no file in a subfolder.
KV_FOLDER = "kv_scales"
# File with the scales, for formats that store scales as tensors of the checkpoint.
SCALES_SHARD = "model-kv-scales.safetensors"
# The base of HfHubHTTPError is the base error of the client's HTTP library, requests or httpx.
_HUB_ERRORS: tuple[type[Exception], ...] = (
    *HfHubHTTPError.__bases__,
    OSError,
    ValueError,
    SafetensorsParsingError,
)


@dataclass(frozen=True)
class LocalFolder:
    """The files of a checkpoint in a local folder."""

    root: Path
    destination: Path | None = None  # folder that the files will be moved to, for messages

    @property
    def origin(self) -> str:
        """Name of the folder, for messages."""
        return str(self.destination or self.root)

    def find_file(self, name: str) -> Path | None:
        """Return the path of a file, or None if it does not exist."""
        path = self.root / name
        try:
            return path if path.is_file() else None
        except OSError as error:  # for example if the name is too long
            raise ScaleError(
                f"{self.origin}: expected the name of a file, got {format_value(name)}: "
                f"{error.strerror}. Correct the file that names it"
            ) from error

    def list_tensors(self, name: str) -> list[str] | None:
        """Return the tensor names of a safetensors file, or None if there is no such file."""
        path = self.find_file(name)
        return None if path is None else read_header(path)[0]

    def list_files(self, suffix: str) -> list[str]:
        """Return the names of the files with this suffix."""
        return sorted(path.name for path in self.root.glob(f"*{suffix}"))


@dataclass
class HubFolder:
    """Like `LocalFolder`, for a repository on the Hub. Fetches only small files and scales.

    The revision and the options for fetching are as in transformers.
    """

    repo: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    force_download: bool = False
    subfolder: str | None = None
    # Reason why a file was not fetched, or "". With a reason, only cached files are read, although
    # more may exist.
    offline_reason: str = field(default="", init=False)
    _paths: dict[str, Path | None] = field(default_factory=dict, init=False)

    @property
    def is_offline(self) -> bool:
        return self.local_files_only or constants.HF_HUB_OFFLINE or bool(self.offline_reason)

    @property
    def origin(self) -> str:
        return f"{self.repo} ({self.offline_reason})" if self.offline_reason else self.repo

    def find_file(self, name: str) -> Path | None:
        if name not in self._paths:
            self._paths[name] = None
            with self._ignore_missing():
                path = hf_hub_download(
                    self.repo,
                    name,
                    subfolder=self.subfolder,
                    revision=self.revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    local_files_only=self.is_offline,
                    force_download=self.force_download and not self.is_offline,
                )
                self._paths[name] = Path(path)
        return self._paths[name]

    def list_tensors(self, name: str) -> list[str] | None:
        path_in_repo = f"{self.subfolder}/{name}" if self.subfolder else name
        with self._ignore_missing():
            path = try_to_load_from_cache(self.repo, path_in_repo, self.cache_dir, self.revision)
            if isinstance(path, str) and not self.force_download:
                return read_header(Path(path))[0]
            if not self.is_offline:
                # This request fetches only the header, some kilobytes of the file.
                metadata = HfApi().parse_safetensors_file_metadata(
                    self.repo, path_in_repo, revision=self.revision, token=self.token
                )
                return list(metadata.tensors)
        return None

    def list_files(self, suffix: str) -> list[str]:
        return []  # files of a repository are only found by name

    @contextmanager
    def _ignore_missing(self) -> Iterator[None]:
        """Ignore that a file does not exist, or is not cached while the Hub is unreachable.

        Raise ScaleError for any other error of the Hub's client.
        """
        try:
            yield
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):
                reason = "offline: cached files only" if self.is_offline else "Hub unreachable"
                self.offline_reason = self.offline_reason or reason
        except _HUB_ERRORS as error:
            if isinstance(error, ScaleError):
                raise
            raise ScaleError(
                f"{self.repo}: expected a repository that can be read, got {type(error).__name__}: "
                f"{error}. Check the name, the revision and the token"
            ) from error


Folder = LocalFolder | HubFolder


@dataclass(frozen=True)
class Checkpoint:
    """The configs of a checkpoint, and the file of each tensor."""

    folder: Folder
    config: Config  # content of config.json, empty if it does not exist
    modelopt_config: Config | None  # content of hf_quant_config.json
    tensor_files: Mapping[str, str]  # tensor name -> file name
    removed_tensors: Collection[str] = ()  # tensors of the files, but not of the checkpoint

    @property
    def origin(self) -> str:
        return self.folder.origin

    @cached_property
    def declaration(self) -> Declaration:
        return find_declaration(self.config, self.modelopt_config)


def read_configs(folder: Folder) -> Checkpoint:
    """Return a checkpoint with its configs, but without its tensors."""
    path = folder.find_file("config.json")
    modelopt_path = folder.find_file(HF_QUANT_CONFIG)
    config = {} if path is None else read_json(path, unique=False)
    modelopt_config = None if modelopt_path is None else read_json(modelopt_path, unique=False)
    return Checkpoint(folder, config, modelopt_config, {})


def find_indexed_tensors(folder: Folder) -> dict[str, str]:
    """Return the file of each tensor, from `SINGLE_FILE` or an index, or {} if neither exists.

    transformers also prefers both to other files, which `find_shard_tensors` reads.
    """
    if (names := folder.list_tensors(SINGLE_FILE)) is not None:
        return dict.fromkeys(names, SINGLE_FILE)
    for index in (INDEX_FILE, *folder.list_files(".safetensors.index.json")):
        if (path := folder.find_file(index)) is not None:
            return read_weight_map(path)
    return {}


def find_shard_tensors(folder: Folder) -> dict[str, str]:
    """Return the file of each tensor, read from the headers of all safetensors files."""
    files: dict[str, str] = {}
    shards = folder.list_files(".safetensors")
    # Files named "consolidated" are a copy of the weights in a different layout.
    weight_shards = [name for name in shards if not name.startswith("consolidated")]
    for shard in weight_shards or shards:
        for name in folder.list_tensors(shard) or ():
            if name in files and LIKELY_SCALE_PATTERN.search(name):
                raise ScaleError(
                    f"{folder.origin}: expected {name} in only one file, got it in {files[name]} "
                    f"and {shard}. Pass {files[name]} or {shard} to from_file"
                )
            files[name] = shard
    return files
