"""A repository of the Hub as a folder: as little as possible is fetched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

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

__all__ = ["HUB_ERRORS", "HubFolder"]

T = TypeVar("T")


@dataclass
class HubFolder:
    """A repository. Only small files, and those that hold scales, are ever fetched."""

    repo: str
    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool
    subfolder: str | None
    # Why only cached files are read, once a request has failed: others may exist all the same.
    trouble: str = ""
    found: dict[str, Path | None] = field(default_factory=dict)

    @property
    def offline(self) -> bool:
        return self.local_files_only or constants.HF_HUB_OFFLINE or bool(self.trouble)

    @property
    def origin(self) -> str:
        return f"{self.repo} ({self.trouble})" if self.trouble else self.repo

    def path(self, name: str) -> Path | None:
        def fetch() -> Path:
            return Path(
                hf_hub_download(
                    self.repo,
                    name,
                    subfolder=self.subfolder,
                    revision=self.revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    local_files_only=self.offline,
                    force_download=self.force_download and not self.offline,
                )
            )

        if name not in self.found:
            self.found[name] = self._asked(fetch)
        return self.found[name]

    def header(self, name: str) -> list[str] | None:
        file = f"{self.subfolder}/{name}" if self.subfolder else name

        def fetch() -> list[str]:
            here = try_to_load_from_cache(self.repo, file, self.cache_dir, self.revision)
            if isinstance(here, str) and not self.force_download:
                return read_header(Path(here))[0]
            if self.offline:
                raise EntryNotFoundError(f"{file} is not cached")
            # A request of some kilobytes instead of the whole file.
            found = HfApi().parse_safetensors_file_metadata(
                self.repo, file, revision=self.revision, token=self.token
            )
            return list(found.tensors)

        return self._asked(fetch)

    def others(self, suffix: str) -> list[str]:
        return []

    def _asked(self, fetch: Callable[[], T]) -> T | None:
        try:
            return fetch()
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError) and not self.trouble:
                self.trouble = "offline: cached files only" if self.offline else "Hub out of reach"
            return None
        except HUB_ERRORS as error:
            if isinstance(error, ScaleError):
                raise
            raise ScaleError(
                f"{self.repo}: expected a repository that can be read, got "
                f"{type(error).__name__}: {error}; check the name, the revision and the token"
            ) from error


# The base of HfHubHTTPError is the base of whatever HTTP library the Hub's client uses.
HUB_ERRORS: tuple[type[Exception], ...] = (
    *HfHubHTTPError.__bases__,
    OSError,
    ValueError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)
