"""The format "hf_fp8kv": our own file, which holds every granularity and the centers exactly.

The report of the calibration is a second file. Next to weights both are in a folder of their own.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors

from ...errors import ScaleError
from ...formats import LayerPlan
from ...utils.files import convert_read_errors, read_json
from ..checkpoint.checkpoint import OWN_FILE, Checkpoint
from ..layer_scales import LayerScales, ScaleData
from ..report import REPORT_FILE, CalibrationReport
from .base import ScaleFormat, to_json

logger = logging.getLogger(__name__)

# The entry of the file's metadata, JSON, and the parts of it that every file has.
METADATA, _KIND = "hf_fp8kv", {"version": 1, "dtype": "float8_e4m3fn"}


class HfFp8kv(ScaleFormat):
    """The library's own format. A folder with its file is never read as a checkpoint."""

    name = "hf_fp8kv"
    granularity = "channel"
    holds_centers = True

    def files(
        self, scales: ScaleData, tp_size: int = 1, checkpoint: Checkpoint | None = None
    ) -> dict[str, bytes]:
        about: dict[str, object] = {
            **_KIND,
            "model_type": scales.model_type,
            "origin": scales.origin,
            "read_as": scales.format,
            "fingerprint": dict(scales.fingerprint),
        }
        if scales.plan is not None:
            about["plan"] = {i: list(map(str, plan)) for i, plan in scales.plan.items()}
        tensors: dict[str, torch.Tensor] = {}
        for index, layer in scales.layers.items():
            named = {"k_scale": layer.k, "v_scale": layer.v, "k_center": layer.k_center}
            tensors |= {f"layers.{index}.{n}": t.clone() for n, t in named.items() if t is not None}
        report = {} if scales.report is None else {REPORT_FILE: to_json(scales.report.to_dict())}
        # The scales come last: with them in place, the files are complete.
        return {**report, OWN_FILE: to_safetensors(tensors, {METADATA: json.dumps(about)})}

    def missing_facts(self, scales: ScaleData, checkpoint: Checkpoint | None = None) -> list[str]:
        fact = "its report is about other scales, so it is not read with these"
        report = scales.report
        return [] if report is None or report.scales_digest == scales.digest else [fact]


def read_own_file(path: Path) -> ScaleData:
    """Return the scales of a file of ours, with the report next to it."""
    expected = "a file of scales as save_pretrained writes it"
    with convert_read_errors(path, expected), safe_open(path, "pt") as file:
        about = json.loads(file.metadata()[METADATA])
        if about | _KIND != about:
            raise ScaleError(
                f"{path}: expected {_KIND}, got {about.get('version')!r} and "
                f"{about.get('dtype')!r}; update hf_fp8kv"
            )
        plans = {int(i): LayerPlan.parse(*pair) for i, pair in about.get("plan", {}).items()}
        parts: dict[int, dict[str, torch.Tensor]] = {index: {} for index in plans}
        for name in file.keys():  # noqa: SIM118
            _, index, part = name.split(".")
            parts.setdefault(int(index), {})[part] = file.get_tensor(name)
        layers = {
            index: LayerScales(
                part.pop("k_scale", None), part.pop("v_scale", None), part.pop("k_center", None),
                f"{path}: layers.{index}", plans.get(index), **part,
            )
            for index, part in parts.items()
        }  # fmt: skip
        fingerprint = {int(index): str(digits) for index, digits in about["fingerprint"].items()}
        scales = ScaleData(
            layers, HfFp8kv.name, about["model_type"], str(path), fingerprint=fingerprint
        )
    place = path.parent / REPORT_FILE
    if not place.is_file():
        return scales
    try:
        report = CalibrationReport.from_dict(read_json(place), str(place))
    except ScaleError as error:  # the scales do not need it
        logger.warning("the report of the calibration is left out: %s", error)
        return scales
    if report.scales_digest != scales.digest:
        logger.warning("%s: is about other scales than those beside it, and left out", place)
        return scales
    return replace(scales, report=report)
