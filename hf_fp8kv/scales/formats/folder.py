"""A folder of a checkpoint's files: what the readers ask of it, and one on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...utils.files import read_header

__all__ = ["Folder", "LocalFolder"]


class Folder(Protocol):
    """A checkpoint's files, here or on the Hub."""

    @property
    def origin(self) -> str: ...

    def path(self, name: str) -> Path | None:
        """The file, fetched when it is far; None when there is none."""

    def header(self, name: str) -> list[str] | None:
        """The names of a safetensors file's tensors; None when there is no such file."""

    def others(self, suffix: str) -> list[str]:
        """The names of the files that are known without fetching them and end so."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine."""

    root: Path

    @property
    def origin(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path | None:
        path = self.root / name
        return path if path.is_file() else None

    def header(self, name: str) -> list[str] | None:
        path = self.path(name)
        return None if path is None else read_header(path)[0]

    def others(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.root.glob(f"*{suffix}"))
