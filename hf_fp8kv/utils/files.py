"""Read JSON and safetensors files with this package's errors, and write files atomically."""

import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import ConfigError, FP8KVError, OutOfPagesError, ScaleError
from .text import format_value

# Suffixes of files that are never read, because reading them can run code.
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy")
# Suffixes of the files that hold the weights of a model.
WEIGHT_SUFFIXES = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
# The format in the metadata of a file of `FP8PagedCache.save`.
CACHE_FORMAT = "hf_fp8kv.cache"
_MAX_JSON_BYTES = 256 << 20
# Links could lead out of a folder, and reading a pipe could block. (Windows lacks these flags.)
SAFE_OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))


@contextmanager
def convert_read_errors(
    path: object, expected: str, error_class: type[FP8KVError] = ScaleError
) -> Iterator[None]:
    """Convert errors of reading a file to `error_class`, except OutOfPagesError.

    A ScaleError is not converted to another ScaleError.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfPagesError) or (
            type(error) is ScaleError and error_class is ScaleError
        ):
            raise
        raise error_class(
            f"{path}: expected {expected}, got {type(error).__name__}: {error}. "
            "The file may be damaged, or a different file. Fetch or write it again"
        ) from error


def parse_index(text: str) -> int:
    """Return the index of a layer. Raise ValueError for a second spelling, such as "00"."""
    index = int(text)
    if str(index) != text:
        raise ValueError(f"expected {index} as the number of a layer, got {text!r}")
    return index


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file. Raise ValueError or OSError (ELOOP for a link)."""
    opener = lambda path, flags: os.open(path, flags | SAFE_OPEN_FLAGS)  # noqa: E731
    with open(path, "rb", opener=opener) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"expected a regular file of at most {max_bytes} bytes")
        return file.read(status.st_size)


def read_json(path: Path, *, unique: bool = True) -> dict[str, object]:
    """Return the JSON object in a file. With `unique`, duplicate keys are an error."""

    def make_object(entries: list[tuple[str, object]]) -> dict[str, object]:
        json_object = dict(entries)
        if unique and len(json_object) < len(entries):
            key = Counter(name for name, _ in entries).most_common(1)[0][0]
            raise ScaleError(
                f"{path}: expected every key once, got {key!r} twice. Delete an entry for {key!r}"
            )
        return json_object

    with convert_read_errors(path, f"a JSON file of at most {_MAX_JSON_BYTES} bytes"):
        if (size := path.stat().st_size) > _MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes")
        content = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=make_object)
    if not isinstance(content, dict):
        raise ScaleError(
            f"{path}: expected a JSON object, got {type(content).__name__}. Fetch or write it again"
        )
    return content


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, by the tensor's name, from a safetensors index."""
    weight_map = read_json(path).get("weight_map")
    file_names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    # A file in another folder is not part of the checkpoint.
    invalid_names = [
        name for name in file_names if not isinstance(name, str) or Path(name).name != name
    ]
    if not isinstance(weight_map, dict) or invalid_names or not file_names:
        got = format_value(invalid_names[0] if invalid_names else weight_map)
        raise ScaleError(
            f"{path}: expected file names of tensors in weight_map, got {got}. Fetch it again"
        )
    return weight_map


def read_header(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of a safetensors file's tensors, and its metadata."""
    with convert_read_errors(path, "a safetensors file"), safe_open(path, "pt") as file:
        return list(file.keys()), dict(file.metadata() or {})


def parse_metadata(contents: bytes) -> dict[str, str]:
    """Return the metadata in the contents of a safetensors file. Raise any error if invalid."""
    num_bytes = int.from_bytes(contents[:8], "little")
    return json.loads(contents[8 : 8 + num_bytes])["__metadata__"]  # type: ignore[no-any-return]


def write_atomically(
    files: Mapping[Path, bytes | Callable[[Path], object] | None], *, is_synced: bool = True
) -> None:
    """Write all files completely. If a file cannot be written, leave all files unchanged.

    The content of a file is bytes, or a function that writes to a path. None deletes the file.
    Missing folders are created. With `is_synced`, files and folders survive a loss of power.

    If the process is killed between two renames, only the first files are replaced, but each file
    is complete. Pass the file that refers to all other files last.
    """
    # The name is random, so that other users cannot predict it.
    suffix = f"{os.getpid()}-{secrets.token_hex(8)}.part"
    partial_files = {path: path.with_name(f".{path.name}.{suffix}") for path in files}
    try:
        for path, content in files.items():
            if content is None:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                try:
                    content(partial_files[path])
                except SafetensorError as error:  # for example if the disk is full
                    raise OSError(f"{path}: expected to write a file, got {error}") from error
            else:
                with partial_files[path].open("xb") as file:  # fails for an existing link
                    file.write(content)
            if is_synced:
                # On POSIX, files are opened as "rb", because a link may lead to a read-only file.
                with partial_files[path].open("rb" if os.name == "posix" else "rb+") as file:
                    os.fsync(file.fileno())
        for path, partial_file in partial_files.items():
            if files[path] is None:
                path.unlink(missing_ok=True)
            else:
                partial_file.replace(path)
    finally:
        for partial_file in partial_files.values():
            partial_file.unlink(missing_ok=True)
    if not is_synced:
        return
    for folder in {path.parent for path in files}:
        with suppress(OSError):  # fails on Windows and on some file systems
            descriptor = os.open(folder, os.O_RDONLY)
            with suppress(OSError):
                os.fsync(descriptor)
            os.close(descriptor)


def check_model_name(name: str) -> None:
    """Raise ConfigError for a path without a folder, or for a folder without a config file."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if is_path and not os.path.isdir(name):
        raise ConfigError(
            f"expected the folder of a model or a Hub id, got {name!r}: no such folder"
        )
    config_files = ("config.json", "adapter_config.json")
    if os.path.isdir(name) and not any((Path(name) / file).is_file() for file in config_files):
        raise ConfigError(
            f"expected the folder of a model, got {name!r}: no config.json in it. Check the path"
        )
