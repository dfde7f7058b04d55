"""One file, or a whole checkpoint: which reader it is for."""

import logging
import os
import re
from pathlib import Path

from ...errors import ScaleError
from ...utils.files import PICKLES, read_header, read_json, read_weight_map
from ..kv_scales import KVScales
from ..report import REPORT_FILE, CalibrationReport
from .checkpoint_tensors import read_tensors
from .config import Declaration, declaration
from .folder import Folder, LocalFolder
from .hub import HubFolder
from .native import OWN_FILE, read_own
from .request import Request, check_model_type, complete
from .tensor_names import LIKELY, matched
from .trtllm import rank_files, read_ranks
from .vllm_json import JSON_FILE, read_vllm_json

__all__ = ["read_checkpoint", "read_file", "tensor_files"]

logger = logging.getLogger(__package__)


def read_file(path: Path, want: Request) -> KVScales:
    """The scales of one file, whichever kind it is."""
    if path.suffix.lower() in PICKLES:
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix}; pickles are never "
            "loaded, convert the file to safetensors"
        )
    if not os.path.isfile(path):
        advice = "use from_pretrained" if os.path.isdir(path) else "check the path"
        raise ScaleError(f"{path}: expected a file, found none; {advice}")
    if path.suffix == ".json":
        data = read_json(path)
        if "weight_map" in data:
            return _read_beside(path, read_weight_map(path), want)
        return read_vllm_json(path, data, want, {})
    if path.suffix != ".safetensors":
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix!r}; name one of those"
        )
    names, metadata = read_header(path)
    if "hf_fp8kv" in metadata:
        return _read_own(path, names, metadata["hf_fp8kv"], want)
    return _read_beside(path, dict.fromkeys(names, path.name), want)


def _read_own(path: Path, names: list[str], about: str, want: Request) -> KVScales:
    layers, model_type = read_own(path, names, about)
    check_model_type(path, model_type, want.model_type, want)
    expected = range(want.num_layers) if want.num_layers else sorted(layers)
    layers = complete(layers, expected, want, str(path))
    scales = KVScales(layers, "hf_fp8kv", model_type, str(path))
    return _reported(scales, path.with_name(REPORT_FILE))


def _reported(scales: KVScales, path: Path) -> KVScales:
    """The scales with the report beside them, if it is theirs; they are good without it."""
    if not path.is_file():
        return scales
    try:
        report = CalibrationReport.from_dict(read_json(path), str(path))
    except ScaleError as error:
        logger.warning("the report of the calibration is left out: %s", error)
        return scales
    if report.scales_digest != scales.digest:
        logger.warning("%s: is about other scales than those beside it, and left out", path)
        return scales
    return scales.with_report(report)


def _read_beside(path: Path, files: dict[str, str], want: Request) -> KVScales:
    """The scales of one file of a checkpoint, or of its index, with the config beside it."""
    folder = LocalFolder(path.parent)
    return read_tensors(folder, files, want, *_declared(folder))


def read_checkpoint(
    name: str,
    want: Request,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    subfolder: str | None = None,
) -> KVScales:
    """The scales of a local folder or of a repository of the Hub."""
    if name and os.path.isfile(name):
        return read_file(Path(name), want)
    if name and os.path.isdir(name):
        return _read_folder(LocalFolder(Path(name) / (subfolder or "")), want)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", name):
        raise ScaleError(
            f"{name!r}: expected a folder, a file or a repository id, found none; check the path"
        )
    if Path(name).suffix.lower() in PICKLES:
        return read_file(Path(name), want)
    cache = None if cache_dir is None else Path(cache_dir)
    hub = HubFolder(name, revision, token, cache, local_files_only, force_download, subfolder)
    return _read_folder(hub, want)


def _read_folder(folder: Folder, want: Request) -> KVScales:
    """Our own file, else the tensors of the checkpoint, else the JSON beside them."""
    own = folder.path(OWN_FILE)
    if own is not None:
        folder.path(REPORT_FILE)  # fetched to lie beside it
        return read_file(own, want)
    declared, config = _declared(folder)
    files = _indexed(folder)
    ranks = {} if files else rank_files(folder, declared)
    if ranks:
        return read_ranks(folder, ranks, want, declared, config)
    files = files or _unindexed(folder)
    hits, _ = matched(files, declared)
    if hits and folder.path("config.json") is None and want.strict:
        raise ScaleError(
            f"{folder.origin}: expected a config.json beside the checkpoint, found none: it "
            "says whether the scales are of FP8; add it, or pass strict=False"
        )
    beside = None if hits else folder.path(JSON_FILE)
    if beside is not None:
        logger.info("%s: no scales among its tensors, reading %s", folder.origin, JSON_FILE)
        return read_vllm_json(beside, read_json(beside), want, config)
    return read_tensors(folder, files, want, declared, config)


def tensor_files(folder: Folder) -> dict[str, str]:
    """Tensor names and their files; the order of preference is that of transformers."""
    return _indexed(folder) or _unindexed(folder)


def _indexed(folder: Folder) -> dict[str, str]:
    """The tensors of the one file, or of the index; empty when there is neither."""
    names = folder.header("model.safetensors")
    if names is not None:
        return dict.fromkeys(names, "model.safetensors")
    indices = ["model.safetensors.index.json", *folder.others(".safetensors.index.json")]
    for index in indices:
        path = folder.path(index)
        if path is not None:
            return read_weight_map(path)
    return {}


def _unindexed(folder: Folder) -> dict[str, str]:
    """The tensors of every file, when no index says which belong together."""
    shards = folder.others(".safetensors")
    # The same weights in another layout, beside the ordinary ones.
    ordinary = [name for name in shards if not name.startswith("consolidated")]
    files: dict[str, str] = {}
    for shard in ordinary or shards:
        for name in folder.header(shard) or ():
            if name in files and LIKELY.search(name):
                raise ScaleError(
                    f"{folder.origin}: expected {name} in one file, got it in {files[name]} and "
                    f"{shard}; name one of them with from_file"
                )
            files[name] = shard
    return files


def _declared(folder: Folder) -> tuple[Declaration, dict[str, object]]:
    """What the configs declare, and the main config (empty when there is none)."""
    path, second = folder.path("config.json"), folder.path("hf_quant_config.json")
    config = {} if path is None else read_json(path, unique=False)
    about = None if second is None else read_json(second, unique=False)
    return declaration(config, about), config
