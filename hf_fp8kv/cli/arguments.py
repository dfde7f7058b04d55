"""Arguments that several commands have: their help, their values, and the completions of a shell.

An invalid value raises `typer.BadParameter`, which exits with 2.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..formats import ADAPTIVE, ALIASES, AUTO, DEFAULT_DTYPE, FORMATS, STATIC_DTYPE
from ..ops import CHOICES


def offer(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function with which a shell completes one of the values."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def choice(values: Iterable[str], aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the keywords of an option that has one of the values, or an alias of one."""
    known = {**(aliases or {}), **{value: value for value in values}}

    def parse(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(f"expected one of: {', '.join(known)}; got {text!r}")
        return known[text]

    return {"parser": parse, "autocompletion": offer(known), "metavar": "TEXT"}


def parse_memory(text: str) -> int:
    """Return the number of bytes for a text such as "8GiB", "16 GB", "512M" or "1000000"."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if size is None:
        raise typer.BadParameter(f"expected a size such as 8GiB or 500MB, got {text!r}")
    base = 1024 if size[3] else 1000
    return int(float(size[1]) * base ** " kmgt".index(size[2].lower() or " "))


def parse_path(path: str) -> str:
    """Return the path of a file to write, if its folder exists, before minutes are spent."""
    if not Path(path).parent.is_dir():
        raise typer.BadParameter(f"expected a file in a folder that exists, got {path!r}")
    return path


def parse_plot(path: str) -> str:
    """Return the path of a picture, if it can be drawn."""
    if Path(path).suffix.lower() != ".png":
        raise typer.BadParameter(f"expected a file that ends in .png, got {path!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is not installed: pip install 'hf-fp8kv[plot]'")
    return parse_path(path)


def parse_scales(text: str) -> str | float:
    """Return a number if the text is one, else the text: a file, folder or repository."""
    try:
        return float(text)
    except ValueError:
        return text


_SIDE = choice((*FORMATS, AUTO), ALIASES)
FORMAT = choice(FORMATS, {alias: name for alias, name in ALIASES.items() if name in FORMATS})

SIZE: dict[str, Any] = {"metavar": "SIZE", "parser": parse_memory}

Model = Annotated[str | None, typer.Option(help="A folder or a Hub id. Default: the demo model.")]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:1, ...", autocompletion=offer(("auto", "cpu", "cuda"))
    ),
]
ModelDtype = Annotated[
    str,
    typer.Option(
        help="auto (the checkpoint's), bfloat16, float16, float32.",
        **choice(("auto", "bfloat16", "float16", "float32")),
    ),
]
Backend = Annotated[
    str, typer.Option(help=f"{', '.join(CHOICES[:-1])} or {CHOICES[-1]}.", **choice(CHOICES))
]
Scales = Annotated[
    str, typer.Argument(help="A file, a folder or a Hub id, in any supported format.")
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(FORMATS)}; model: its own dtype; {ADAPTIVE}: measured once for the "
        f"model; {', '.join(f'{alias} = {x}' for alias, x in ALIASES.items() if x in FORMATS)}. "
        f"Default: {DEFAULT_DTYPE}, or {STATIC_DTYPE} with --scales.",
        **choice((*FORMATS, AUTO, ADAPTIVE), ALIASES),
    ),
]
KeyDtype = Annotated[str | None, typer.Option(help="A format or model, for K only.", **_SIDE)]
ValueDtype = Annotated[str | None, typer.Option(help="A format or model, for V only.", **_SIDE)]
Plan = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|TEXT",
        help="How layers are stored, instead of the three above: where choose_plan's result was "
        "saved, or text such as 'fp8_e3m4 centered'.",
    ),
]
StaticScales = Annotated[
    Any,
    typer.Option(
        metavar="PATH|FLOAT",
        parser=parse_scales,
        help="Static scales: a file, a folder, a Hub id or a constant. They may say how each layer "
        "is stored (calibrate --plan). Default: dynamic scales.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing scales; never weights.")
]

PYDOC = "pydoc"
TEXTS_HELP = "A .txt file, or JSON lines (.jsonl). pydoc stands for Python's own documentation."

Dtype = Annotated[
    str | None,
    typer.Option(
        help="The format to choose scales for, or to measure them in. Default: fp8_e4m3.", **FORMAT
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="Number of tokens to read.")]
MaxLength = Annotated[int | None, typer.Option(min=2, help="Tokens in one sequence.")]
MaxPosition = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Also try the scales at other positions, up to this one; centers of K must help "
        "there, too. Default: eight times --max-length, or as many as the model has.",
    ),
]
TextColumn = Annotated[
    str | None, typer.Option(help="JSON lines: the key of the text. Default: text.")
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Use the model's chat template for every text / refuse conversations. "
        "Default: use it for conversations, not for plain texts.",
    ),
]

# The arguments of the library among the options of `calibrate` and `inspect`.
_OPTIONS = {
    "dtype", "max_tokens", "max_length", "max_position", "text_column", "chat_template",
    "granularity", "center", "plan", "margin", "batch_size", "held_out",
}  # fmt: skip


def load_texts(name: str) -> Path | list[str]:
    """Return the file, or pydoc's text on each of Python's topics."""
    if name == PYDOC:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--texts: expected a file, or {PYDOC} for Python's own documentation, got {name!r}; "
            "check the path"
        )
    return path


def page_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the arguments of a cache that `generate` and `serve` have in common."""
    names = ("key_dtype", "value_dtype", "plan", "scales", "backend")
    return {"dtype": ctx.params["kv_cache_dtype"], **{name: ctx.params[name] for name in names}}


def given_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options of the library that were given; it has the defaults of the others."""
    return {n: value for n, value in ctx.params.items() if n in _OPTIONS and value is not None}
