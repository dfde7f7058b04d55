"""Folders of a checkpoint's files: on this machine, or a repository of the Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)

from ...errors import ScaleError
from ...utils.files import read_header

# The base of HfHubHTTPError is the base of whatever HTTP library the Hub's client uses.
_HUB_ERRORS: tuple[type[Exception], ...] = (
    *HfHubHTTPError.__bases__,
    OSError,
    ValueError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine."""

    root: Path
    place: Path | None = None  # where its files will be, for messages

    @property
    def origin(self) -> str:
        """What messages call it."""
        return str(self.place or self.root)

    def path(self, name: str) -> Path | None:
        """Return a file, fetched if it is remote, or None if there is none."""
        path = self.root / name
        return path if path.is_file() else None

    def header(self, name: str) -> list[str] | None:
        """Return the tensor names of a safetensors file, or None if there is no such file."""
        path = self.path(name)
        return None if path is None else read_header(path)[0]

    def list_files(self, suffix: str) -> list[str]:
        """Return the names with this suffix that are known without fetching anything."""
        return sorted(path.name for path in self.root.glob(f"*{suffix}"))


class HubOptions(TypedDict, total=False):
    """Which version of a repository to read and how to fetch it, as everywhere in transformers."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool
    subfolder: str | None


@contextmanager
def translate_hub_errors(repo: str, verb: str) -> Iterator[None]:
    """Raise ScaleError for whatever the Hub's client raises; `verb` is "read" or "written"."""
    try:
        yield
    except _HUB_ERRORS as error:
        if isinstance(error, ScaleError):
            raise
        raise ScaleError(
            f"{repo}: expected a repository that can be {verb}, got {type(error).__name__}: "
            f"{error}; check the name, the revision and the token"
        ) from error


@dataclass
class HubFolder:
    """A repository of the Hub. Only small files, and those that hold scales, are ever fetched."""

    repo: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    force_download: bool = False
    subfolder: str | None = None
    # Set when a request has failed: only cached files are read then, though others may exist.
    trouble: str = field(default="", init=False)
    paths: dict[str, Path | None] = field(default_factory=dict, init=False)

    @property
    def offline(self) -> bool:
        return self.local_files_only or constants.HF_HUB_OFFLINE or bool(self.trouble)

    @property
    def origin(self) -> str:
        return f"{self.repo} ({self.trouble})" if self.trouble else self.repo

    def path(self, name: str) -> Path | None:
        if name not in self.paths:
            self.paths[name] = None
            with self._request():
                path = hf_hub_download(
                    self.repo, name, subfolder=self.subfolder, revision=self.revision,
                    token=self.token, cache_dir=self.cache_dir, local_files_only=self.offline,
                    force_download=self.force_download and not self.offline,
                )  # fmt: skip
                self.paths[name] = Path(path)
        return self.paths[name]

    def header(self, name: str) -> list[str] | None:
        file = f"{self.subfolder}/{name}" if self.subfolder else name
        with self._request():
            cached = try_to_load_from_cache(self.repo, file, self.cache_dir, self.revision)
            if isinstance(cached, str) and not self.force_download:
                return read_header(Path(cached))[0]
            if not self.offline:
                # A request of some kilobytes instead of the whole file.
                metadata = HfApi().parse_safetensors_file_metadata(
                    self.repo, file, revision=self.revision, token=self.token
                )
                return list(metadata.tensors)
        return None

    def list_files(self, suffix: str) -> list[str]:
        return []

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Pass over a file that does not exist, or is not cached while the Hub is out of reach."""
        with translate_hub_errors(self.repo, "read"):
            try:
                yield
            except EntryNotFoundError as error:
                if isinstance(error, LocalEntryNotFoundError) and not self.trouble:
                    self.trouble = (
                        "offline: cached files only" if self.offline else "Hub out of reach"
                    )


Folder = LocalFolder | HubFolder
