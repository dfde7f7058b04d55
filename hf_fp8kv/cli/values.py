"""The values of options: what each may be, what a shell completes, and how text becomes it.

Whatever a command line cannot mean is a `typer.BadParameter`, which exits with 2.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, get_args

import typer

from ..errors import ConfigError

__all__ = [
    "CacheDtype",
    "Device",
    "Json",
    "KeyDtype",
    "Model",
    "Scales",
    "StaticScales",
    "ValueDtype",
    "attentions",
    "backends",
    "cache_dtypes",
    "check_plot",
    "check_writable",
    "completing",
    "devices",
    "dtypes",
    "formats",
    "granularities",
    "model_dtypes",
    "one_of",
    "parse_dtype",
    "parse_format",
    "parse_memory",
    "parse_scales",
    "targets",
    "weights",
]


def dtypes() -> Iterable[str]:
    from ..formats import FORMATS

    return ("fp8", *FORMATS, "fp8_e4m3fn")


def cache_dtypes() -> Iterable[str]:
    return (*dtypes(), "auto")


def formats() -> Iterable[str]:
    from ..scales.kv_scales import CHECKPOINT_FORMATS

    return CHECKPOINT_FORMATS


def granularities() -> Iterable[str]:
    from ..scales.kv_scales import Granularity

    return get_args(Granularity)


def model_dtypes() -> Iterable[str]:
    return ("auto", "bfloat16", "float16", "float32")


def weights() -> Iterable[str]:
    from ..scales.formats.write_checkpoint import Weights

    return get_args(Weights)


def backends() -> Iterable[str]:
    from ..ops import CHOICES

    return CHOICES


def targets() -> Iterable[str]:
    from ..kernel_check.check import TARGETS

    return TARGETS


def attentions() -> Iterable[str]:
    return ("fp8_paged", "sdpa", "eager", "flex_attention")


def devices() -> Iterable[str]:
    return ("auto", "cpu", "cuda")


def completing(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Returns what completes the values of an option; they are asked for when it is used."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


Model = Annotated[str | None, typer.Option(help="A folder or a hub id. Default: the demo's model.")]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", autocompletion=completing(devices))
]
Scales = Annotated[
    str, typer.Argument(help="A file, a folder or a hub id, in any format that is read.")
]
_cache_dtypes = completing(cache_dtypes)
CacheDtype = Annotated[
    str,
    typer.Option(
        help="fp8 = fp8_e4m3 = fp8_e4m3fn, fp8_e5m2, fp8_e3m4, fp8_e4m3fnuz, auto.",
        autocompletion=_cache_dtypes,
    ),
]
KeyDtype = Annotated[
    str | None, typer.Option(help="The same, for K alone.", autocompletion=_cache_dtypes)
]
ValueDtype = Annotated[
    str | None, typer.Option(help="The same, for V alone.", autocompletion=_cache_dtypes)
]
StaticScales = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|FLOAT",
        help="Static scales: a file, a folder, a hub id or a constant. Default: dynamic ones.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def one_of(value: str, values: Iterable[str], option: str) -> str:
    """Returns the value of an option, which is one of these."""
    if value not in values:
        message = f"expected one of: {', '.join(values)}; got {value!r}"
        raise typer.BadParameter(message, param_hint=option)
    return value


def check_writable(path: str | None, option: str) -> None:
    """A path to write to lies in a folder that is there: known before minutes are spent."""
    if path is not None and not Path(path).parent.is_dir():
        message = f"expected a file in a folder that exists, got {path!r}"
        raise typer.BadParameter(message, param_hint=option)


def check_plot(path: str | None) -> None:
    """The same for a picture, and there is something to draw it with."""
    check_writable(path, "--plot")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        message = "matplotlib is not installed: pip install 'hf-fp8kv[plot]'"
        raise typer.BadParameter(message, param_hint="--plot")


def parse_memory(text: str, option: str = "--memory") -> int:
    """Returns the bytes that "8GiB", "16 GB", "512M" or "1000000" stand for."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if found is None:
        message = f"expected a size such as 8GiB or 500MB, got {text!r}"
        raise typer.BadParameter(message, param_hint=option)
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** " kmgt".index(found[2].lower() or " "))


def parse_dtype(text: str, option: str) -> str:
    from ..formats import parse_dtype

    try:
        return parse_dtype(text, option)
    except ConfigError as error:
        message = str(error).removeprefix(f"{option}: ")
        raise typer.BadParameter(message, param_hint=option) from None


def parse_format(text: str, option: str) -> str:
    """Returns the 8-bit format that a name stands for."""
    return parse_dtype(one_of(text, dtypes(), option), option)


def parse_scales(text: str | None) -> str | float | None:
    """Returns a constant, or the name of a file, folder or repository as it is."""
    try:
        return text and float(text)
    except ValueError:
        return text
