"""Files: JSON and safetensors, read with our errors and written atomically."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import ScaleError
from .text import format_value

# Suffixes of files that are not opened: reading them can run code.
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy")
# Suffixes of files that hold the weights of a model.
WEIGHTS = (".safetensors", ".gguf", *PICKLES)
# What the metadata of a file of `FP8PagedCache.save` says as its format.
CACHE_FORMAT = "hf_fp8kv.cache"


@contextmanager
def convert_read_errors(path: Path | str, expected: str) -> Iterator[None]:
    """Convert the errors of the libraries that read a file to `ScaleError`."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        if isinstance(error, ScaleError):
            raise
        raise ScaleError(
            f"{path}: expected {expected}, got {type(error).__name__}: {error}; "
            "the file may be cut off, fetch or write it again"
        ) from error


def read_json(path: Path, *, unique: bool = True) -> dict[str, object]:
    """Return the JSON object in a file; with `unique`, duplicate keys are an error."""

    def make_dict(items: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(items)
        if unique and len(result) < len(items):
            names = [name for name, _ in items]
            double = next(name for name in names if names.count(name) > 1)
            raise ScaleError(f"{path}: expected every key once, got {double!r} twice; delete one")
        return result

    with convert_read_errors(path, "a JSON file"):
        data = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=make_dict)
    if not isinstance(data, dict):
        raise ScaleError(
            f"{path}: expected a JSON object, got {type(data).__name__}; fetch or write it again"
        )
    return data


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor, from a safetensors index."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ScaleError(
            f"{path}: expected a weight_map with tensors, got {format_value(files)}; fetch it again"
        )
    for file in files.values():
        # A file in another folder is not part of the checkpoint.
        if not isinstance(file, str) or Path(file).name != file:
            raise ScaleError(
                f"{path}: expected file names in weight_map, got {format_value(file)}; fetch it "
                "again"
            )
    return files


def read_header(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of a safetensors file's tensors, and its metadata."""
    with convert_read_errors(path, "a safetensors file"), safe_open(path, "pt") as file:
        return list(file.keys()), dict(file.metadata() or {})


def write_all(files: Mapping[Path, bytes]) -> None:
    """Write every file completely, or leave all of them as they were if one cannot be written.

    Folders that are not there are made.

    A process that is killed between two renames leaves the first files replaced, each complete: so
    pass the file without which the others are not read last.
    """
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in files}
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with parts[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, part in parts.items():
            part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
