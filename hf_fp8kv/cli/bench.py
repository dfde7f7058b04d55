"""`hf-fp8kv bench`: speed, memory and quality beside transformers' own caches."""

import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from .shared import DEMO, load_config, load_model, print_parts, show_progress
from .values import Device, Model, check_choice, check_plot, check_writable, complete_from

_SUITES = {
    "cpu": ("hf_fp8kv.bench.cpu", "run_cpu_suite"),
    "gpu": ("hf_fp8kv.bench.gpu", "run_gpu_suite"),
    "host": ("hf_fp8kv.bench.host", "run_host_suite"),
    "quality": ("hf_fp8kv.bench.quality", "run_quality_suite"),
    "accuracy": ("hf_fp8kv.bench.accuracy", "run_accuracy_suite"),
    "long": ("hf_fp8kv.bench.long", "run_long_suite"),
    "latent": ("hf_fp8kv.bench.latent_accuracy", "run_latent_suite"),
    "serve": ("hf_fp8kv.bench.serve", "run_serve_suite"),
    "capacity": ("hf_fp8kv.bench.capacity", "run_capacity_suite"),
    "memory": ("hf_fp8kv.bench.memory", "run_memory_suite"),
    "prefix": ("hf_fp8kv.bench.prefix", "run_prefix_suite"),
}


def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="cpu, gpu: speed and memory. host: what the processor does for a step on a GPU; "
            "needs none. quality: a model's predictions. accuracy: the same "
            "by format, kind of scales and center (minutes). long: the same and answers at long "
            "context, beside other caches (a quarter of an hour). latent: predictions of random "
            "MLA models by format. capacity: how many tokens fit. "
            "memory: bytes of models with sliding windows. serve: the server under load. "
            "prefix: the first answer of a new process, with its prompt's pages on disk.",
            autocompletion=complete_from(lambda: _SUITES),
        ),
    ] = "cpu",
    model: Model = None,
    device: Device = "auto",
    texts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many texts to score; quality: 4, accuracy: 8, long: 1 of each kind.",
            show_default=False,
        ),
    ] = None,
    positions: Annotated[
        str | None, typer.Option(help="long: where to score and ask, such as 1024,4096,8192.")
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(help="long: of text, such as code,chat; or none.")
    ] = None,
    scored: Annotated[
        int | None,
        typer.Option(
            min=1, help="long: how many tokens of a text before a position: 64.", show_default=False
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="long: such as 'single needle,variables'; or none.")
    ] = None,
    answers: Annotated[
        int | None,
        typer.Option(
            min=1, help="long: how many of each task at each position: 10.", show_default=False
        ),
    ] = None,
    caches: Annotated[
        str | None, typer.Option(help="long: which, such as default,int8,q8_0.")
    ] = None,
    outliers: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="long: plant keys so many times as large in some channels, such as 50; the model "
            "computes the same, but K is harder to store.",
            show_default=False,
        ),
    ] = None,
    outlier_heads: Annotated[
        int | None,
        typer.Option(min=1, help="long: --outliers in every n-th head only.", show_default=False),
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="long: more of all, up to 8192 tokens (hours).")
    ] = False,
    memory: Annotated[
        float,
        typer.Option(
            "--memory-gib",
            min=0.001,
            max=10_000,
            help="capacity: free memory beside the model, in GiB.",
        ),
    ] = 40.0,
    experiments: Annotated[
        bool, typer.Option("--experiments", help="gpu: try other launch parameters instead.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="gpu: run all of it on tiny shapes, on any machine.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="gpu: how long it may take.")] = 255.0,
    shown: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="gpu, long: measure nothing, show what --json wrote; long: also several times.",
        ),
    ] = None,
    plot_path: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="PATH",
            help="Draw (PNG); gpu: a roofline; long: KL by position, of each model.",
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write JSON too; - prints it and no table."),
    ] = None,
) -> None:
    """Measure against transformers' own caches; quality, accuracy, long: --model and --texts."""
    check_choice(suite, _SUITES, "--suite")
    check_writable(json_path, "--json")
    check_plot(plot_path)
    for option, given in (("--from", shown), ("--plot", plot_path)):
        if given and suite not in ("gpu", "long"):
            message = f"expected --suite gpu or long with it, got {suite!r}"
            raise typer.BadParameter(message, param_hint=option)
    only_long = {
        "--positions": positions, "--kinds": kinds, "--scored": scored, "--tasks": tasks,
        "--answers": answers, "--caches": caches, "--outliers": outliers,
        "--outlier-heads": outlier_heads, "--thorough": thorough or None,
    }  # fmt: skip
    for option, value in only_long.items():
        if value is not None and suite != "long":
            raise typer.BadParameter(f"requires --suite long, got {suite}", param_hint=option)
    module, function = _SUITES[suite]
    measures = importlib.import_module(module)
    if shown:
        if len(shown) > 1 and (suite == "gpu" or json_path is not None):
            message = (
                f"expected one file, got {len(shown)}; several are for --suite long and tables"
            )
            raise typer.BadParameter(message, param_hint="--from")
        results = [_load_result(path, suite) for path in shown]
        _show_results(suite, measures, results, plot_path, json_path)
        return
    arguments: dict[str, Any] = {}
    saved = None if json_path in (None, "-") else Path(str(json_path))
    if suite == "gpu":
        arguments = {"dry": dry, "seconds": seconds, "save": saved, **_gpu_arguments(device, dry)}
        if experiments:
            arguments["sections"] = ("ceilings", "experiments")
    if suite == "capacity":
        arguments = {"memory_gib": memory}
        if model is not None:
            arguments |= {"config": load_config(model), "name": model}
    if suite in ("quality", "accuracy", "long"):
        loaded, tokenizer = load_model(model, device, "float32")
        arguments = {"model": loaded, "tokenizer": tokenizer, "name": model or DEMO}
        if suite == "long":
            arguments |= measures.THOROUGH if thorough else {}
            arguments |= _long_arguments(
                positions=positions, kinds=kinds, tasks=tasks, caches=caches
            )
            numbers = {"answers": answers, "scored": scored, "outliers": outliers,
                       "outlier_heads": outlier_heads}  # fmt: skip
            arguments |= {name: value for name, value in numbers.items() if value is not None}
            arguments["save"] = saved
        if texts is not None:
            arguments["texts"] = texts
    if suite == "prefix":
        arguments = {"model": model}
    if suite == "serve":
        from ..serving.server.options import require_server

        require_server()
        arguments = {"model": model, "device": device}
    with show_progress() as report:
        result = getattr(measures, function)(**arguments, progress=report)
    _show_results(suite, measures, [result], plot_path, json_path)


def _show_results(
    suite: str,
    measures: ModuleType,
    results: list[dict[str, Any]],
    plot_path: str | None,
    json_path: str | None,
) -> None:
    """Write and draw what was measured, and print it."""
    if json_path is not None and json_path != "-":
        Path(json_path).write_text(json.dumps(results[0], indent=2) + "\n")
    if plot_path is not None:
        measures.plot(results if suite == "long" else results[0], plot_path)
    if json_path == "-":
        print(json.dumps(results[0]))
    else:
        print_parts([measures.format_table(result) for result in results], piped_width=140)


def _long_arguments(**lists: str | None) -> dict[str, Any]:
    """Return the arguments of the long suite that are lists, of what was given of them."""
    given = {name: text.split(",") for name, text in lists.items() if text is not None}
    arguments: dict[str, Any] = {k: [part.strip() for part in v] for k, v in given.items()}
    arguments |= {name: [] for name in ("kinds", "tasks") if lists[name] == "none"}
    if "positions" in arguments:
        try:
            arguments["positions"] = [int(position) for position in arguments["positions"]]
        except ValueError:
            message = f"expected numbers of tokens, such as 1024,4096; got {lists['positions']!r}"
            raise typer.BadParameter(message, param_hint="--positions") from None
    return arguments


def _load_result(path: str, suite: str) -> dict[str, Any]:
    """Return what a suite wrote with --json."""
    try:
        result: Any = json.loads(Path(path).read_text())
        if result["suite"] == suite and ("goals" if suite == "gpu" else "tasks") in result:
            return dict(result)
    except (ValueError, KeyError, TypeError, OSError):
        pass
    message = f"expected what --suite {suite} wrote with --json, got {path!r}"
    raise typer.BadParameter(message, param_hint="--from")


def _gpu_arguments(device: str, dry: bool) -> dict[str, Any]:
    """Return the device and backend to measure: a GPU, or in a dry run what there is."""
    import torch

    from ..ops import choose_backend

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
