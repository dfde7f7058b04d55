"""`hf-fp8kv check`: installed versions, a model's path through the cache, compiled kernels."""

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
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
    summary: Annotated[
        bool,
        typer.Option("--summary", help="With --kernels: only what reads pages, in two tables."),
    ] = False,
    before: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --summary: what --json printed, to be compared."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show versions and backends; with --model, how each of its layers will run.

    --kernels needs no GPU; it exits with 1 if a kernel does not compile or breaks a rule.
    """
    for option, value, needed, given in (
        ("--target", target, "--kernels", kernels),
        ("--summary", summary, "--kernels", kernels),
        ("--before", before, "--summary", summary),
    ):
        if value and not given:
            raise typer.BadParameter(f"requires {needed}", param_hint=option)
    if kernels:
        _check_kernels(target, summary, _read_rows(before) if before else {}, as_json)
        return
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


def _read_rows(path: str) -> Any:
    """Return the rows of what `--json` printed, by target, variant and kernel."""
    try:
        rows = itertools.chain(*json.loads(Path(path).read_text())["targets"].values())
        return {(row["target"], row["variant"], row["kernel"]): row for row in rows}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"expected what `check --kernels --json` prints, got {path!r}: {error!r}"
        raise typer.BadParameter(message, param_hint="--before") from None


def _check_kernels(chosen: list[str] | None, summary: bool, before: Any, as_json: bool) -> None:
    from ..kernel_check import check as kernel_check
    from ..kernel_check import report
    from ..kernel_check.rules import TARGETS

    for name in chosen or ():
        check_choice(name, TARGETS, "--target")
    if version("triton") == "not installed":
        raise ConfigError("cannot compile kernels: triton is not installed: pip install triton")
    with show_progress() as on_progress:
        names = chosen or tuple(TARGETS)
        variants = tuple(report.SUMMARY) if summary else ()
        found = kernel_check.check_targets(names, variants=variants, progress=on_progress)
    if as_json:
        rows = {name: [asdict(row) for row in of_one] for name, of_one in found.items()}
        print(json.dumps({"triton": version("triton"), "targets": rows}))
    elif summary:
        print_parts(list(report.tabulate_summary(found, before)), piped_width=200)
    else:
        print_parts(report.tables(found), piped_width=160)
    if any(row.violations for rows in found.values() for row in rows):
        raise typer.Exit(1)
