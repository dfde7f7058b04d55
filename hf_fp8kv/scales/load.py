"""Reading scales: of one file, or of a whole checkpoint in a folder or on the Hub."""

import os
import re
from pathlib import Path
from typing import Unpack

from ..errors import ScaleError
from ..utils.files import PICKLES, read_header, read_weight_map
from .checkpoint.folder import Folder, HubFolder, HubOptions, LocalFolder
from .checkpoint.read_tensors import read_tensors
from .declarations import open_checkpoint
from .formats import SCALE_FORMATS
from .formats.hf_fp8kv import OWN_FILE
from .layer_scales import ScaleData
from .report import REPORT_FILE
from .request import Request


def read_file(path: Path, request: Request) -> ScaleData:
    """Return the scales of one file, whichever format it is in; raise ScaleError otherwise."""
    if path.suffix.lower() in PICKLES:
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix}; pickles are never "
            "loaded, convert the file to safetensors"
        )
    if not os.path.isfile(path):
        advice = "use from_pretrained" if os.path.isdir(path) else "check the path"
        raise ScaleError(f"{path}: expected a file, found none; {advice}")
    if path.suffix not in (".json", ".safetensors"):
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix!r}; name one of those"
        )
    for format in SCALE_FORMATS.values():
        scales = format.read_file(path, request)
        if scales is not None:
            return scales
    # One file of a checkpoint, or its index: the config beside it says what the scales mean.
    if path.suffix == ".json":
        files = read_weight_map(path)
    else:
        files = dict.fromkeys(read_header(path)[0], path.name)
    return read_tensors(open_checkpoint(LocalFolder(path.parent)), files, request)


def read_checkpoint(name: str, request: Request, **hub_options: Unpack[HubOptions]) -> ScaleData:
    """Return the scales of a local folder or repository of the Hub; raise ScaleError if none."""
    hub = HubFolder(name, **hub_options)
    if name and os.path.isdir(name):
        return _read_folder(LocalFolder(Path(name) / (hub.subfolder or "")), request)
    if name and (os.path.isfile(name) or Path(name).suffix.lower() in PICKLES):
        return read_file(Path(name), request)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", name):
        raise ScaleError(
            f"{name!r}: expected a folder, a file or a repository id, found none; check the path"
        )
    return _read_folder(hub, request)


def _read_folder(folder: Folder, request: Request) -> ScaleData:
    own = folder.path(OWN_FILE)
    if own is not None:
        folder.path(REPORT_FILE)  # fetched to lie beside it
        return read_file(own, request)
    checkpoint = open_checkpoint(folder)
    for format in reversed(SCALE_FORMATS.values()):
        scales = format.read(checkpoint, request)
        if scales is not None:
            return scales
    return read_tensors(checkpoint, checkpoint.files, request)  # raises: there are none
