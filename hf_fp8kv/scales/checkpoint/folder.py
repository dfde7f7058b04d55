"""Folder: the files of a checkpoint, on this machine or elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...utils.files import read_header

__all__ = ["Folder", "LocalFolder"]


class Folder(Protocol):
    """The files of a checkpoint, on this machine or on the Hub."""

    @property
    def origin(self) -> str: ...

    def path(self, name: str) -> Path | None:
        """Return the file, fetched if it is remote, or None if there is none."""

    def header(self, name: str) -> list[str] | None:
        """Return the tensor names of a safetensors file, or None if there is no such file."""

    def list_files(self, suffix: str) -> list[str]:
        """Return the names with this suffix that are known without fetching anything."""


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

    def list_files(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.root.glob(f"*{suffix}"))
