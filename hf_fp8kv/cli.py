"""The command line: `hf-fp8kv generate | check | bench`; the only module that prints.

Exit codes: 0 when it worked, 1 for an error that the message on stderr explains, 2 for a command
line that cannot be understood.
"""

import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import ConfigError, Fp8KVError

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

_PACKAGES = ("hf-fp8kv", "torch", "transformers", "triton", "numba", "safetensors", "gguf")

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
        print(_version("hf-fp8kv"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


# -- generate --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """One answer, and what its cache took; sizes in bytes, speed in tokens per second."""

    cache: str
    scales: str
    attention: str
    text: str
    token_ids: list[int]
    tokens_per_second: float | None
    cached_tokens: int
    cache_bytes: int
    bytes_per_token: float
    tokens_that_fit: int


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
    asker = _Asker.load(model, device, max_new_tokens, temperature, seed)
    inputs = asker.encode(text, chat)
    runs = [asker.dense(inputs, room), asker.paged(inputs, room, attn, options)]
    if as_json:
        facts = {"prompt": text, "model": asker.name, "options": options, "memory_bytes": room}
        answers = {"agreement": _agreement(*runs), "runs": [asdict(run) for run in runs]}
        print(json.dumps(facts | answers))
    else:
        _print(_comparison(asker.name, text, runs, memory))


class _Asker:
    """A model with its tokenizer, and how it is asked; each answer is one `_Run`."""

    def __init__(
        self, name: str, model: Any, tokenizer: Any, how: dict[str, Any], seed: int
    ) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.how, self.seed = how, seed

    @classmethod
    def load(
        cls, name: str | None, device: str, max_new_tokens: int, temperature: float, seed: int
    ) -> "_Asker":
        """Returns the model of that name (None: the demo's), ready to be asked."""
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        # None: what a checkpoint recommends for sampling does not count here.
        how |= {"temperature": temperature or None, "top_p": None, "top_k": None}
        model, tokenizer = _load(name, device)
        return cls(name or "SmolLM2-135M-Instruct (demo)", model, tokenizer, how, seed)

    def encode(self, text: str, chat: bool) -> Mapping[str, Any]:
        """Returns the arguments of generate() for a text, or for a user's turn of a chat."""
        if not chat:
            found = self.tokenizer(text, return_tensors="pt")
        elif self.tokenizer.chat_template is None:
            raise ConfigError(
                f"--chat expected a chat template, {self.name} has none; leave it out"
            )
        else:
            found = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True, return_tensors="pt", return_dict=True,
            )  # fmt: skip
        if found["input_ids"].shape[1] == 0:
            raise ConfigError("expected a prompt of at least one token, got an empty one")
        # Some tokenizers also return token_type_ids, which many models do not take.
        names = ("input_ids", "attention_mask")
        return {name: found[name].to(self.model.device) for name in names}

    def dense(self, inputs: Mapping[str, Any], room: int) -> _Run:
        """Returns the answer from transformers' own cache, with the model's own attention."""
        from transformers import DynamicCache

        ids, speed, cache = self._ask(inputs, lambda: DynamicCache(config=self.model.config))
        tensors = [
            t for layer in cache.layers for t in vars(layer).values() if hasattr(t, "nbytes")
        ]
        size, tokens = sum(t.nbytes for t in tensors), cache.get_seq_length()
        dtype = str(self.model.dtype).removeprefix("torch.")
        return self._run(
            f"DynamicCache {dtype}", "none", ids, speed, tokens, size, size / tokens, room
        )

    def paged(
        self, inputs: Mapping[str, Any], room: int, attn: str, options: Mapping[str, Any]
    ) -> _Run:
        """Returns the answer from FP8 pages, read by the attention `attn`."""
        from . import FP8PagedCache

        try:
            self.model.set_attn_implementation(attn)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"--attn {attn} does not work with {self.name}: {error}") from error
        ids, speed, cache = self._ask(inputs, lambda: FP8PagedCache(self.model.config, **options))
        sizes, page = cache.memory_footprint(), options["page_size"]
        tokens, size = sizes["tokens"], sizes["used"] + sizes.get("other", 0)
        # The last page is partly filled: what a token takes is its share of a full one.
        share = sizes["used"] / (-(-tokens // page) * page) + sizes.get("other", 0) / tokens
        k, v = (options[side] or options["dtype"] for side in ("key_dtype", "value_dtype"))
        name = f"pages of {page}, {k}" if k == v else f"pages of {page}, K {k}, V {v}"
        scales = "none" if (k, v) == ("auto", "auto") else str(options["scales"] or "dynamic")
        return self._run(name, scales, ids, speed, tokens, size, share, room)

    def _ask(
        self, inputs: Mapping[str, Any], make: Callable[[], Any]
    ) -> tuple[list[int], float | None, Any]:
        """Returns new tokens, tokens per second after the first one, and the cache."""
        import torch

        stamps: list[float] = []

        def stamp(input_ids: "torch.Tensor", *_: Any, **__: Any) -> "torch.Tensor":
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        # Two tokens first, not counted: kernels are compiled at their first use.
        self.model.generate(
            **inputs, past_key_values=make(), max_new_tokens=2, min_new_tokens=2, do_sample=False
        )
        torch.manual_seed(self.seed)
        cache = make()
        found = self.model.generate(
            **inputs, past_key_values=cache, stopping_criteria=[stamp], **self.how
        )
        stamps = stamps[-(found.shape[1] - inputs["input_ids"].shape[1]) :]
        steps = len(stamps) - 1
        speed = steps / (stamps[-1] - stamps[0]) if steps > 0 else None
        return found[0, inputs["input_ids"].shape[1] :].tolist(), speed, cache

    def _run(
        self, name: str, scales: str, ids: list[int], speed: float | None,
        tokens: int, size: int, per_token: float, room: int,
    ) -> _Run:  # fmt: skip
        return _Run(
            cache=name,
            scales=scales,
            attention=str(self.model.config._attn_implementation),
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=ids,
            tokens_per_second=speed,
            cached_tokens=tokens,
            cache_bytes=size,
            bytes_per_token=per_token,
            tokens_that_fit=int(room / per_token),
        )


def _load(name: str | None, device: str) -> tuple[Any, Any]:
    """Returns the model, on its device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from . import demo

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = name or str(demo.model_path())
    try:
        with nullcontext() if name else demo.no_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load a language model from {folder!r}: {error}") from error
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot use --device {device}: {error}") from error


def _agreement(one: _Run, other: _Run) -> dict[str, int | None]:
    """Returns in how many places both have the same token, and the first one that differs.

    Places count from 0. The longer answer gives their number: a token that has no partner differs.
    """
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    same = [a == b for a, b in pairs]
    places = max(len(one.token_ids), len(other.token_ids))
    same += [False] * (places - len(same))
    first = None if all(same) else same.index(False)
    return {"equal": sum(same), "of": places, "first_difference": first}


def _comparison(
    name: str, prompt: str, runs: Sequence[_Run], memory: str
) -> "list[RenderableType]":
    from rich.table import Table
    from rich.text import Text

    dense, paged = runs
    found = _agreement(dense, paged)
    first = found["first_difference"]
    differs = "" if first is None else f", first difference at token {first + 1}"
    less = paged.bytes_per_token / dense.bytes_per_token
    table = Table(show_lines=True)
    table.add_column("", style="bold")
    for run in runs:
        table.add_column(run.cache, ratio=1, overflow="fold")
    table.add_row("answer", *(Text(run.text) for run in runs))
    table.add_row("same tokens", "", f"{found['equal']} of {found['of']}{differs}")
    table.add_row("scales", *(Text(run.scales) for run in runs))
    table.add_row("attention", *(run.attention for run in runs))
    table.add_row(
        "cache", *(f"{_size(run.cache_bytes)} for {run.cached_tokens} tokens" for run in runs)
    )
    table.add_row(
        "per token", _size(dense.bytes_per_token), f"{_size(paged.bytes_per_token)} ({less:.2f} x)"
    )
    table.add_row(f"fit into {memory}", *(f"{run.tokens_that_fit:,} tokens" for run in runs))
    speeds = (run.tokens_per_second for run in runs)
    table.add_row("tokens/s", *("-" if speed is None else f"{speed:.1f}" for speed in speeds))
    return [Text.assemble((name, "bold"), ": ", prompt), table]


# -- check -----------------------------------------------------------------------------------------


@app.command()
def check(model: _Model = None, device: _Device = "cpu", as_json: _Json = False) -> None:
    """Show versions and backends; with --model, what each of its layers will run on."""
    import torch

    from .ops import available_backends

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in _PACKAGES},
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
    _print([_rows_table([{"": name, "found": found} for name, found in rows.items()])])
    if report is not None:
        print(report)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


# -- bench -----------------------------------------------------------------------------------------


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu", as_json: _Json = False
) -> None:
    """Measure speed against transformers' own caches, in interleaved pairs."""
    measures = importlib.import_module(".bench", __package__)
    suites = {"cpu": "run_cpu_suite", "gpu": "run_gpu_suite"}
    run = getattr(measures, suites.get(suite, ""), None)
    if run is None:
        known = ", ".join(name for name, function in suites.items() if hasattr(measures, function))
        raise typer.BadParameter(f"expected one of: {known}; got {suite!r}", param_hint="--suite")
    rows: list[dict[str, Any]] = run()
    if as_json:
        print(json.dumps({"suite": suite, "rows": rows}, default=str))
    else:
        _print([_rows_table(rows)])


# -- reading and printing --------------------------------------------------------------------------


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


def _size(amount: float) -> str:
    """Returns a number of bytes as a person reads it."""
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def _rows_table(rows: Sequence[Mapping[str, object]]) -> "RenderableType":
    """Returns a table with a column for every key that a row has."""
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table()
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name, ""))) for name in names))
    return table


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print(parts: "Sequence[RenderableType]") -> None:
    from rich.console import Console

    console = Console()
    for part in parts:
        console.print(part)


if __name__ == "__main__":
    main()
