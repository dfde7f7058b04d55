"""The format "hf_fp8kv": our own file, which holds every granularity and the centers exactly.

Beside `kv_scales.safetensors` lies `kv_scales.json`, for people, and the report of the calibration.
In the folder of a model all of them are in a folder of their own.
"""

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors

from ...errors import ConfigError, ScaleError
from ...formats import LayerPlan
from ...utils.files import convert_read_errors, read_header, read_json
from ...utils.text import format_list, format_value
from ..checkpoint.checkpoint import Checkpoint
from ..layer_scales import LayerScales, ScaleData
from ..report import REPORT_FILE, CalibrationReport
from ..request import Request
from .base import ScaleFormat
from .tensor_format import to_json

logger = logging.getLogger(__name__)

OWN_FILE, _SUMMARY = "kv_scales.safetensors", "kv_scales.json"
# Where they are beside weights: servers take every safetensors file beside them for more,
# and look into no folder in it.
OWN_FOLDER = "kv_scales"
_METADATA, _DTYPE = "hf_fp8kv", "float8_e4m3fn"
# Version 2 has plans, which nobody may ignore. What has none is written as version 1, which readers
# of before know.
_VERSIONS = (1, 2)
_SAVE_AGAIN = "write the file again with save_pretrained"
_INDEX = re.compile("[0-9]{1,9}")
_TENSOR = re.compile(r"layers\.([0-9]{1,9})\.(k_scale|v_scale|k_center)")


class HfFp8kv(ScaleFormat):
    """The library's own format. A folder with its file is never read as a checkpoint."""

    name = "hf_fp8kv"
    own_files = (REPORT_FILE, _SUMMARY, OWN_FILE)
    granularity = "channel"
    holds_centers = True
    for_servers = False

    def read_file(self, path: Path, request: Request) -> ScaleData | None:
        if path.suffix != ".safetensors":
            return None
        names, metadata = read_header(path)
        if _METADATA not in metadata:
            return None
        layers, model_type, fingerprint = _read_layers(path, names, metadata[_METADATA])
        request.check_model_type(path, model_type, request.model_type)
        expected = range(request.num_layers) if request.num_layers else sorted(layers)
        layers = request.select_layers(layers, expected, str(path))
        scales = ScaleData(layers, self.name, model_type, str(path), fingerprint=fingerprint)
        return _add_report(scales, path.parent)

    def files(self, scales: ScaleData, tp_size: int) -> dict[str, bytes]:
        about: dict[str, object] = {
            "version": 1 if scales.plan is None else 2,
            "dtype": _DTYPE,
            "layers": list(scales.layers),
            "model_type": scales.model_type,
            "origin": scales.origin,
            "read_as": scales.format,
        }
        if scales.fingerprint:
            about["fingerprint"] = {str(i): digits for i, digits in scales.fingerprint.items()}
        if scales.plan is not None:
            about["plan"] = {str(i): list(map(str, plan)) for i, plan in scales.plan.items()}
            about["dynamic"] = scales.is_dynamic
        tensors: dict[str, torch.Tensor] = {}
        for index, layer in scales.layers.items():
            named = {"k_scale": layer.k, "v_scale": layer.v, "k_center": layer.k_center}
            tensors |= {f"layers.{index}.{n}": t.clone() for n, t in named.items() if t is not None}
        summary = {**about, "scales": {str(i): _summarize(s) for i, s in scales.layers.items()}}
        report = {} if scales.report is None else {REPORT_FILE: to_json(scales.report.to_dict())}
        # The scales come last: with them in place, the files are complete.
        return {
            **report,
            _SUMMARY: to_json(summary),
            OWN_FILE: to_safetensors(tensors, {_METADATA: json.dumps(about)}),
        }

    def checkpoint_files(
        self, scales: ScaleData, checkpoint: Checkpoint, tp_size: int
    ) -> dict[str, bytes]:
        return {f"{OWN_FOLDER}/{n}": file for n, file in self.files(scales, tp_size).items()}


def _read_layers(
    path: Path, names: Iterable[str], about: str
) -> tuple[dict[int, LayerScales], str | None, dict[int, str]]:
    """Return the layers of a file, its model type and the fingerprint of that model's weights.

    `about` is our entry of its metadata.
    """
    with convert_read_errors(path, f"JSON in the metadata entry {_METADATA!r}"):
        header = json.loads(about)
    if not isinstance(header, dict):
        header = {}
    version, is_dynamic = header.get("version"), False
    plans: dict[int, LayerPlan] = {}
    if version not in _VERSIONS or header.get("dtype") != _DTYPE:
        raise ScaleError(
            f"{path}: expected version {' or '.join(map(str, _VERSIONS))} and {_DTYPE}, got "
            f"{header.get('version')!r} and {header.get('dtype')!r}; update hf_fp8kv"
        )
    if version > 1:
        plans, is_dynamic = _read_plans(path, header)
    tensors: dict[int, dict[str, torch.Tensor]] = {index: {} for index in plans}
    with convert_read_errors(path, "a safetensors file"), safe_open(path, "pt") as file:
        for name in names:
            match = _TENSOR.fullmatch(name)
            if match is None or file.get_slice(name).get_dtype() != "F32":
                raise ScaleError(
                    f"{path}: expected layers.N.k_scale, v_scale and k_center in F32, got {name}; "
                    f"{_SAVE_AGAIN}"
                )
            tensors.setdefault(int(match[1]), {})[match[2]] = file.get_tensor(name)
    if header.get("layers") != sorted(tensors):
        raise ScaleError(
            f"{path}: expected the layers of its metadata, {header.get('layers')}, got "
            f"{format_list(sorted(tensors))}; {_SAVE_AGAIN}"
        )
    layers = {}
    for index, part in tensors.items():
        found = sorted(set(part) & {"k_scale", "v_scale"})
        if len(found) != (0 if is_dynamic else 2):
            expected = "no scales, which are dynamic" if is_dynamic else "k_scale and v_scale"
            raise ScaleError(
                f"{path}: layer {index}: expected {expected}, got {' and '.join(found) or 'none'}; "
                f"{_SAVE_AGAIN}"
            )
        layers[index] = LayerScales(
            part.get("k_scale"), part.get("v_scale"), part.get("k_center"),
            f"{path}: layers.{index}", plans.get(index),
        )  # fmt: skip
    model_type = header.get("model_type")
    model_type = model_type if isinstance(model_type, str) else None
    return layers, model_type, _read_fingerprint(path, header.get("fingerprint", {}))


def _read_plans(path: Path, header: dict[str, object]) -> tuple[dict[int, LayerPlan], bool]:
    """Return how a file says that each layer is stored, and whether its scales are dynamic."""
    written, is_dynamic = header.get("plan"), header.get("dynamic")
    if not (
        isinstance(is_dynamic, bool)
        and isinstance(written, dict)
        and all(_INDEX.fullmatch(index) for index in written)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in written.values())
        and all(isinstance(side, str) for pair in written.values() for side in pair)
    ):
        raise ScaleError(
            f"{path}: plan: expected K and V of each layer as text, and whether scales are "
            f"dynamic, got {format_value(written)} and {format_value(is_dynamic)}; {_SAVE_AGAIN}"
        )
    try:
        return {int(index): LayerPlan.parse(*pair) for index, pair in written.items()}, is_dynamic
    except ConfigError as error:
        raise ScaleError(f"{path}: {error}; update hf_fp8kv") from error


def _read_fingerprint(path: Path, written: object) -> dict[int, str]:
    """Return the fingerprint that a file holds; those of before have none."""
    if not isinstance(written, dict) or not all(
        _INDEX.fullmatch(index) and isinstance(digits, str) for index, digits in written.items()
    ):
        raise ScaleError(
            f"{path}: fingerprint: expected digits for each layer, got {format_value(written)}; "
            f"{_SAVE_AGAIN}"
        )
    return {int(index): digits for index, digits in written.items()}


def _add_report(scales: ScaleData, folder: Path) -> ScaleData:
    """Return the scales with the report in their folder, if it is theirs: they need none."""
    path = folder / REPORT_FILE
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
    return replace(scales, report=report)


def _summarize(layer: LayerScales) -> dict[str, object]:
    """Return the largest scale of each side, for people to read."""
    return {
        "k": None if layer.k is None else layer.k.max().item(),
        "v": None if layer.v is None else layer.v.max().item(),
        "granularity": layer.granularity,
        "centered": layer.k_center is not None,
        "source": layer.source,
    }
