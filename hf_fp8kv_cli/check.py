"""`hf-fp8kv check`, which shows versions, backends, and how a model uses the cache."""

import json
from typing import Any

from .arguments import Device, Json, Model
from .shared import choose_device, load_model, make_console


def check(model: Model = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Show versions, backends and bytes per token. With --model, also show how layers are stored.

    Without --model, the bytes are for Llama-3.1-8B.
    """
    from hf_fp8kv import FP8PagedCache, check_model, ops
    from hf_fp8kv.serving import capacity
    from hf_fp8kv.utils.environment import describe_hardware, list_versions
    from hf_fp8kv.utils.terminal import build_table, format_size

    device = choose_device(device)
    versions = list_versions()
    backends = {name: reason or "available" for name, reason in ops.explain_backends().items()}
    output: dict[str, Any] = {
        "python": versions["python"],
        "versions": {name: version for name, version in versions.items() if name != "python"},
        "gpus": describe_hardware()["gpus"],
        "backends": backends,
    }
    report = None
    model_name = model or "Llama-3.1-8B"
    if model is None:
        config = capacity.get_config(model_name)
    else:
        loaded_model = load_model(model, device)
        report = check_model(loaded_model)
        config = loaded_model.config
        output["model"] = report.to_dict()
    sizes = None if report and report.refusal else FP8PagedCache(config).count_bytes()
    rows = {**versions, "gpus": ", ".join(output["gpus"]) or "none"}
    rows |= {f"backend {name}": status for name, status in backends.items()}
    if sizes is not None:
        output["token_bytes"] = dict(zip(("bf16", "8-bit pages"), sizes, strict=True))
        for storage_name, num_bytes in output["token_bytes"].items():
            tokens_per_gib = 2**30 / num_bytes
            rows[f"{model_name}, {storage_name}"] = (
                f"{format_size(num_bytes)} per token, {tokens_per_gib:,.0f} tokens per GiB"
            )
    if as_json:
        print(json.dumps(output, default=str))
        return
    make_console().print(build_table({"": "left", "found": "left"}, rows.items()))
    if report is not None:
        print(report)
