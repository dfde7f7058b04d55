"""The command line: `hf-fp8kv generate | check | bench`; the only module that prints.

Exit codes: 0 when it worked, 1 for an error that the message on stderr explains, 2 for a command
line that cannot be understood.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .environment import PACKAGES, version
from .errors import ConfigError, Fp8KVError
from .sidebyside import Asker, agreement, comparison
from .tables import rows_table

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["app", "main"]

app = typer.Typer(
    name="hf-fp8kv",
    help="An FP8 paged KV cache for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEMO = "SmolLM2-135M-Instruct (demo)"
_SUITES = {
    "cpu": (".bench", "run_cpu_suite"),
    "gpu": (".bench_gpu", "run_gpu_suite"),
    "quality": (".quality", "run_quality_suite"),
}

_Model = Annotated[
    str | None, typer.Option(help="A folder or a hub id. Default: the demo's model.")
]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def main() -> None:
    """Runs the command line and exits; an error of ours is one message and exit code 1."""
    try:
        app()
    except (Fp8KVError, OSError) as error:
        print(f"hf-fp8kv: error: {error}", file=sys.stderr)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version("hf-fp8kv"))
        raise typer.Exit


@app.callback()
def _options(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(help="The text to continue or to answer; - reads it from stdin.")
    ] = "London is the capital of",
    model: _Model = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="fp8 = fp8_e4m3 = fp8_e4m3fn, fp8_e5m2, fp8_e3m4, fp8_e4m3fnuz, auto."),
    ] = "fp8",
    key_dtype: Annotated[str | None, typer.Option(help="The same, for K alone.")] = None,
    value_dtype: Annotated[str | None, typer.Option(help="The same, for V alone.")] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|FLOAT",
            help="Static scales: a file, a folder, a hub id or a constant. Default: dynamic ones.",
        ),
    ] = None,
    center_keys: Annotated[
        bool | None,
        typer.Option("--center-keys/--no-center-keys", help="Store K minus a frozen centre."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    page_size: Annotated[int, typer.Option(min=1, help="In tokens.")] = 64,
    backend: Annotated[str, typer.Option(help="auto, torch, numba or triton.")] = "auto",
    attn: Annotated[
        str, typer.Option(help="The attention that reads the pages: fp8_paged, sdpa, eager, ...")
    ] = "fp8_paged",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Counts when the temperature is above 0.")] = 0,
    device: _Device = "auto",
    memory: Annotated[
        str, typer.Option(help="Tell how many tokens fit into this: 8GiB, 500MB, ...")
    ] = "8GiB",
    as_json: _Json = False,
) -> None:
    """Answer a prompt from the usual cache and from FP8 pages, side by side."""
    room = _parse_memory(memory)
    options: dict[str, Any] = {
        "dtype": _parse_dtype(kv_cache_dtype, "--kv-cache-dtype"),
        "key_dtype": key_dtype and _parse_dtype(key_dtype, "--key-dtype"),
        "value_dtype": value_dtype and _parse_dtype(value_dtype, "--value-dtype"),
        "scales": _parse_scales(scales),
        "center_keys": center_keys,
        "page_size": page_size,
        "backend": backend,
    }
    text = sys.stdin.read().strip() if prompt == "-" else prompt
    asker = Asker(
        model or DEMO,
        *_load(model, device),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    inputs = asker.encode(text, chat)
    runs = [asker.dense(inputs, room), asker.paged(inputs, room, attn, options)]
    if as_json:
        facts = {"prompt": text, "model": asker.name, "options": options, "memory_bytes": room}
        answers = {"agreement": agreement(*runs), "runs": [asdict(run) for run in runs]}
        print(json.dumps(facts | answers))
    else:
        _print(comparison(asker.name, text, runs, memory))


@app.command()
def check(
    model: _Model = None,
    device: _Device = "cpu",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile every kernel, and check the machine code.")
    ] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(help="With --kernels: sm_90, gfx942, ...; may be repeated. Default: all."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show versions and backends; with --model, what each of its layers will run on.

    --kernels needs no GPU; it exits with 1 if a kernel does not compile or breaks a rule.
    """
    if kernels:
        _check_kernels(target, as_json)
        return
    if target:
        raise typer.BadParameter("expected --kernels with it", param_hint="--target")
    import torch

    from .ops import available_backends

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "gpus": gpus,
        "backends": {name: why or "available" for name, why in available_backends().items()},
    }
    report = None
    if model is not None:
        from . import check_model

        report = check_model(_load(model, device)[0])
        facts["model"] = report.to_dict()
    if as_json:
        print(json.dumps(facts, default=str))
        return
    rows = {"python": facts["python"], **facts["versions"], "gpus": ", ".join(gpus) or "none"}
    rows |= {f"backend {name}": why for name, why in facts["backends"].items()}
    _print([rows_table([{"": name, "found": found} for name, found in rows.items()])])
    if report is not None:
        print(report)


def _check_kernels(targets: list[str] | None, as_json: bool) -> None:
    from . import kernel_check

    for name in targets or ():
        if name not in kernel_check.TARGETS:
            message = f"expected one of: {', '.join(kernel_check.TARGETS)}; got {name!r}"
            raise typer.BadParameter(message, param_hint="--target")
    if version("triton") == "not installed":
        raise ConfigError("cannot compile kernels: triton is not installed: pip install triton")
    with _progress() as say:
        found = kernel_check.check_targets(targets or tuple(kernel_check.TARGETS), progress=say)
    if as_json:
        rows = {name: [asdict(row) for row in of_one] for name, of_one in found.items()}
        print(json.dumps({"triton": version("triton"), "targets": rows}))
    else:
        _print(kernel_check.tables(found), piped_width=160)
    if any(row.violations for rows in found.values() for row in rows):
        raise typer.Exit(1)


@app.command()
def bench(
    suite: Annotated[
        str, typer.Option(help="cpu, gpu: speed and memory. quality: a model's predictions.")
    ] = "cpu",
    model: _Model = None,
    device: _Device = "auto",
    texts: Annotated[int, typer.Option(min=1, help="How many texts to score.")] = 4,
    experiments: Annotated[
        bool, typer.Option("--experiments", help="gpu: try other launch parameters instead.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="gpu: run all of it on tiny shapes, on any machine.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="gpu: how long it may take.")] = 300.0,
    shown: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PATH", help="gpu: measure nothing, show what --json wrote."
        ),
    ] = None,
    plot_path: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="gpu: draw a roofline (PNG).")
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write JSON too; - prints it and no table."),
    ] = None,
) -> None:
    """Measure against transformers' own caches; --model and --texts are for quality."""
    if suite not in _SUITES:
        message = f"expected one of: {', '.join(_SUITES)}; got {suite!r}"
        raise typer.BadParameter(message, param_hint="--suite")
    # Known before minutes are spent.
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not Path(path).parent.is_dir():
            message = f"expected a file in a folder that exists, got {path!r}"
            raise typer.BadParameter(message, param_hint=option)
    for option, path in (("--from", shown), ("--plot", plot_path)):
        if path is not None and suite != "gpu":
            message = f"expected --suite gpu with it, got {suite!r}"
            raise typer.BadParameter(message, param_hint=option)
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        message = "matplotlib is not installed: pip install 'hf-fp8kv[plot]'"
        raise typer.BadParameter(message, param_hint="--plot")
    module, function = _SUITES[suite]
    measures = importlib.import_module(module, __package__)
    arguments: dict[str, Any] = {}
    if suite == "gpu":
        saved = None if json_path in (None, "-") else Path(str(json_path))
        arguments = {"dry": dry, "seconds": seconds, "save": saved, **_gpu_arguments(device, dry)}
        if experiments:
            arguments["sections"] = ("ceilings", "experiments")
    if suite == "quality":
        loaded, tokenizer = _load(model, device, "float32")
        arguments = {"model": loaded, "tokenizer": tokenizer, "name": model or DEMO, "texts": texts}
    if shown is not None:
        result = _stored(shown)
    else:
        with _progress() as say:
            result = getattr(measures, function)(**arguments, progress=say)
    if plot_path is not None:
        measures.plot(result, plot_path)
    if json_path == "-":
        print(json.dumps(result))
        return
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
    _print([measures.format_table(result)], piped_width=140)


def _stored(path: str) -> dict[str, Any]:
    """Returns what `bench --suite gpu --json` wrote."""
    try:
        result: Any = json.loads(Path(path).read_text())
        if result["suite"] == "gpu" and "targets" in result:
            return dict(result)
    except (ValueError, KeyError, TypeError):
        pass
    message = f"expected what --suite gpu wrote with --json, got {path!r}"
    raise typer.BadParameter(message, param_hint="--from")


def _gpu_arguments(device: str, dry: bool) -> dict[str, Any]:
    """Returns the device and backend to measure: a GPU, or in a dry run what there is."""
    import torch

    from .ops import choose_backend

    if device == "auto":
        device = "cpu" if dry and not torch.cuda.is_available() else "cuda"
    try:
        torch.device(device)
    except RuntimeError:
        message = f"expected auto, cpu, cuda, cuda:1, ...; got {device!r}"
        raise typer.BadParameter(message, param_hint="--device") from None
    if not dry:
        return {"device": device}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    name = "torch" if device == "cpu" and not interpreted else "triton"
    return {"device": device, "backend": choose_backend(name, torch.device(device))}


def _load(name: str | None, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Returns the model (None: the demo's), on its device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from . import demo

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = name or str(demo.model_path())
    try:
        with nullcontext() if name else demo.no_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a language model from {folder!r}: {error}") from error
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot use --device {device}: {error}") from error


def _parse_memory(text: str) -> int:
    """Returns the bytes that "8GiB", "16 GB", "512M" or "1000000" stand for."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if found is None:
        message = f"expected a size such as 8GiB or 500MB, got {text!r}"
        raise typer.BadParameter(message, param_hint="--memory")
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** " kmgt".index(found[2].lower() or " "))


def _parse_dtype(text: str, option: str) -> str:
    from .formats import parse_dtype

    try:
        return parse_dtype(text, option)
    except ConfigError as error:
        message = str(error).removeprefix(f"{option}: ")
        raise typer.BadParameter(message, param_hint=option) from None


def _parse_scales(text: str | None) -> str | float | None:
    """Returns a constant, or the name of a file, folder or repository as it is."""
    try:
        return text and float(text)
    except ValueError:
        return text


def _print(parts: "Sequence[RenderableType]", *, piped_width: int | None = None) -> None:
    """Prints as wide as the terminal or COLUMNS is; into a file or pipe, `piped_width` wide."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if known else piped_width)
    for part in parts:
        console.print(part)


@contextmanager
def _progress() -> Iterator[Callable[..., None]]:
    """Inside, the value tells on stderr what is next, and which share is done where it is known."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("", total=None)

        def say(message: str, share: float | None = None) -> None:
            if not console.is_terminal:
                print(message, file=sys.stderr)
            elif share is None:
                bar.update(task, description=message)
            else:
                bar.update(task, description=message, total=1.0, completed=share)

        yield say


if __name__ == "__main__":
    main()
