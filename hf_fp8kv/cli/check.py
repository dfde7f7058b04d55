"""`hf-fp8kv check`, which shows versions, backends, and how a model uses the cache."""

import json
from typing import Any

from ..attention.check_model import check_model
from ..bench.reporting import build_table
from ..ops import explain_backends
from ..utils.environment import describe_hardware, list_versions
from .arguments import Device, Json, Model
from .shared import load_model, make_console


def check(model: Model = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Show versions and backends. With --model, also show how each layer uses the cache."""
    package_versions = list_versions()
    output: dict[str, Any] = {
        "python": package_versions.pop("python"),
        "versions": package_versions,
        "gpus": describe_hardware()["gpus"],
        "backends": {name: reason or "available" for name, reason in explain_backends().items()},
    }
    report = None
    if model is not None:
        report = check_model(load_model(model, device)[0])
        output["model"] = report.to_dict()
    if as_json:
        print(json.dumps(output, default=str))
        return
    rows = {**list_versions(), "gpus": ", ".join(output["gpus"]) or "none"}
    rows |= {f"backend {name}": status for name, status in output["backends"].items()}
    make_console().print(build_table({"": "left", "found": "left"}, rows.items()))
    if report is not None:
        print(report)
