"""Arguments that several commands share: their help, values, and completions in a shell.

An invalid value raises `typer.BadParameter`, which exits with 2.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

# Copies of names in `hf_fp8kv`, whose import takes seconds. A test compares them.
FORMATS = ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e3m4", "fp8_e2m5", "int8", "int6", "int4")
DEFAULT_DTYPE = "fp8_e3m4"
STATIC_DTYPE = "fp8_e4m3"
AUTO = "auto"
ADAPTIVE = "adaptive"
ALIASES = {"model": AUTO, "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"}
BACKENDS = ("auto", "torch", "cpu", "triton")
SCALE_FORMATS = (
    "vllm-json", "tgi", "compressed-tensors", "autofp8", "modelopt", "quark", "hf_fp8kv",
)  # fmt: skip
GRANULARITIES = ("tensor", "head", "channel")
WEIGHT_MODES = ("copy", "link")
LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical")


def suggest(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that suggests those `values` that complete a word in a shell."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def make_choice(values: Collection[str], aliases: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return keywords of `typer.Option` that accept one of `values`, by its name or an alias."""
    values_by_name = {alias: value for alias, value in aliases.items() if value in values}
    values_by_name |= {value: value for value in values}
    # "model" is clearer than its value "auto", which could mean an automatic choice.
    expected_names = ", ".join(
        "model" if aliases.get("model") == value else value for value in values
    )

    def parse(name: str) -> str:
        if name not in values_by_name:
            similar_names = difflib.get_close_matches(name, values_by_name, n=1, cutoff=0.5)
            hint = f". Did you mean {similar_names[0]!r}?" if similar_names else ""
            raise typer.BadParameter(f"expected one of {expected_names}, got {name!r}{hint}")
        return values_by_name[name]

    return {"parser": parse, "autocompletion": suggest(values_by_name), "metavar": "NAME"}


# Exponents of 1000 or 1024 for the prefixes of a unit.
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_SIZE = 2**50


def parse_size(text: str) -> int:
    """Parse a number of bytes such as "8GiB", "16 GB", "512M" or "1000000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"expected a size such as 8GiB or 500MB, got {text!r}")
    number, prefix, binary_mark = match.groups()
    base = 1024 if binary_mark else 1000
    num_bytes = int(float(number) * base ** _EXPONENTS[prefix.lower()])
    if num_bytes > _MAX_SIZE:
        raise typer.BadParameter(f"expected at most 1 PiB, got {text!r}")
    return num_bytes


def parse_scales(text: str) -> str | float:
    """Parse a number, or return the name of a file, folder or repository."""
    try:
        return float(text)
    except ValueError:
        return text


_SIDE_OPTION = make_choice((*FORMATS, AUTO), ALIASES)
_FORMAT_ALIASES = [f"{alias} = {name}" for alias, name in ALIASES.items() if name in FORMATS]

SIZE: dict[str, Any] = {"metavar": "SIZE", "parser": parse_size}

_MODEL_HELP = "A folder or a Hub id. Default: the demo model."
Model = Annotated[str | None, typer.Option(help=_MODEL_HELP)]
ModelArgument = Annotated[str | None, typer.Argument(help=_MODEL_HELP)]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:1, ...", autocompletion=suggest(("auto", "cpu", "cuda"))
    ),
]
ModelDtype = Annotated[
    str,
    typer.Option(
        help="auto (the checkpoint's), bfloat16, float16, float32.",
        **make_choice(("auto", "bfloat16", "float16", "float32")),
    ),
]
Backend = Annotated[str, typer.Option(help="auto, torch, cpu or triton.", **make_choice(BACKENDS))]
Scales = Annotated[str, typer.Argument(help="File, folder or Hub id, in any supported format.")]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(FORMATS)}, model (the model's dtype), or {ADAPTIVE} (a plan, chosen once "
        f"for the model). {', '.join(_FORMAT_ALIASES)}. "
        f"Default: {ADAPTIVE}, {STATIC_DTYPE} with --scales, or {DEFAULT_DTYPE} with only "
        "--key-dtype or --value-dtype.",
        **make_choice((*FORMATS, AUTO, ADAPTIVE), ALIASES),
    ),
]
KeyDtype = Annotated[str | None, typer.Option(help="Format of K only, or model.", **_SIDE_OPTION)]
ValueDtype = Annotated[str | None, typer.Option(help="Format of V only, or model.", **_SIDE_OPTION)]
Plan = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|TEXT",
        help="Storage plan, instead of --kv-cache-dtype, --key-dtype and --value-dtype: the path "
        "of a saved result of choose_plan, or text such as 'int8 rotated'.",
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(min=6.0, max=8.0, help="Maximum average bits of a value in the plan. Default: 8."),
]
StaticScales = Annotated[
    Any,
    typer.Option(
        metavar="PATH|FLOAT",
        parser=parse_scales,
        help="Static scales: a file, a folder, a Hub id or a constant. They may include a storage "
        "plan. Default: dynamic scales.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing scales, but never weights.")
]
PYDOC = "pydoc"


def load_texts(name: str) -> Path | list[str]:
    """Return the path of a file, or pydoc's text on each of Python's topics."""
    if name == PYDOC:
        from pydoc_data.topics import topics

        return [topics[topic] for topic in sorted(topics)]
    from hf_fp8kv.errors import ConfigError

    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--texts: expected a file, or {PYDOC} for Python's documentation, got {name!r}. Check "
            "the path"
        )
    return path


def collect_cache_options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options of a cache that `generate` and `serve` share.

    Raises:
        ConfigError: An option that chooses formats is given together with --bits.
    """
    from hf_fp8kv.errors import ConfigError

    storage_names = ("kv_cache_dtype", "key_dtype", "value_dtype", "plan", "scales")
    given_names = [name for name in storage_names if ctx.params[name] not in (None, ADAPTIVE)]
    bits = ctx.params["bits"]
    if bits not in (None, 8) and given_names:
        option = f"--{given_names[0].replace('_', '-')}"
        raise ConfigError(
            f"{option}: expected no value with --bits {bits:g}, which chooses a plan, got "
            f"{ctx.params[given_names[0]]!r}. Pass {option} or --bits"
        )
    options = {name: ctx.params[name] for name in (*storage_names[1:], "bits", "backend")}
    return {"dtype": ctx.params["kv_cache_dtype"], **options}
