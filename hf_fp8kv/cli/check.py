"""`hf-fp8kv check`: installed versions, a model's path through the cache, compiled kernels."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..utils.environment import PACKAGES, version
from ..utils.terminal import make_table
from .shared import load_model, print_parts, show_progress
from .values import Device, Json, Model, check_choice, complete_from, targets


def check(
    model: Model = None,
    device: Device = "cpu",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile every kernel and check the machine code.")
    ] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="With --kernels: sm_90, gfx942, ...; repeatable. Default: all.",
            autocompletion=complete_from(targets),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show versions and backends; with --model, how each of its layers will run.

    --kernels needs no GPU; it exits with 1 if a kernel does not compile or breaks a rule.
    """
    if kernels:
        _check_kernels(target, as_json)
        return
    if target:
        raise typer.BadParameter("requires --kernels", param_hint="--target")
    import torch

    from ..ops import available_backends

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "gpus": gpus,
        "backends": {name: why or "available" for name, why in available_backends().items()},
    }
    report = None
    if model is not None:
        from .. import check_model

        report = check_model(load_model(model, device)[0])
        facts["model"] = report.to_dict()
    if as_json:
        print(json.dumps(facts, default=str))
        return
    rows = {"python": facts["python"], **facts["versions"], "gpus": ", ".join(gpus) or "none"}
    rows |= {f"backend {name}": why for name, why in facts["backends"].items()}
    print_parts([make_table([{"": name, "found": value} for name, value in rows.items()])])
    if report is not None:
        print(report)


def _check_kernels(chosen: list[str] | None, as_json: bool) -> None:
    from ..kernel_check import check as kernel_check
    from ..kernel_check.rules import TARGETS

    for name in chosen or ():
        check_choice(name, TARGETS, "--target")
    if version("triton") == "not installed":
        raise ConfigError("cannot compile kernels: triton is not installed: pip install triton")
    with show_progress() as on_progress:
        names = chosen or tuple(TARGETS)
        found = kernel_check.check_targets(names, progress=on_progress)
    if as_json:
        rows = {name: [asdict(row) for row in of_one] for name, of_one in found.items()}
        print(json.dumps({"triton": version("triton"), "targets": rows}))
    else:
        print_parts(kernel_check.tables(found), piped_width=160)
    if any(row.violations for rows in found.values() for row in rows):
        raise typer.Exit(1)
