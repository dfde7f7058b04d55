"""Predictions and answers of a model at long context, under this package's caches and others."""

import json
import sys
from pathlib import Path
from typing import Any

from hf_fp8kv.cli.bench import show_result
from hf_fp8kv.cli.shared import show_progress
from hf_fp8kv.errors import ConfigError, FP8KVError

from ..shared import MODEL, TEXTS, Options, Result, read_options, with_model
from . import THOROUGH, format_table, plot, run_long_suite

OPTIONS: Options = {
    **MODEL,
    **TEXTS,
    "--positions": {"help": "Where to score and ask, such as 1024,4096,8192."},
    "--kinds": {"help": "Kinds of text, such as code,chat; or none."},
    "--scored": {"type": int, "help": "Number of scored tokens before a position."},
    "--tasks": {"help": "Tasks, such as 'single needle,variables'; or none."},
    "--answers": {"type": int, "help": "Number of answers of each task at each position."},
    "--caches": {"help": "Caches, such as default,int8,q8_0."},
    "--outliers": {
        "type": float,
        "help": "Plant keys that are larger by this factor in some channels, such as 50. The model "
        "computes the same, but K is harder to store.",
    },
    "--outlier-heads": {"type": int, "help": "Plant outliers in every n-th head only."},
    "--thorough": {
        "action": "store_true",
        "default": None,
        "help": "More of everything, up to 8192 tokens (hours).",
    },
    "--from": {
        "action": "append",
        "metavar": "PATH",
        "help": "Show what --json wrote instead of measuring. Several are allowed.",
    },
    "--plot": {
        "metavar": "PATH",
        "help": "Draw KL by position, for each model (PNG). --caches picks lines of --from.",
    },
}


def main() -> None:
    """Read the command line, measure or read results, and show them."""
    given, json_path = read_options(__doc__, OPTIONS)
    paths, picture = given.pop("from", []), given.pop("plot", None)
    try:
        results = [_load(path) for path in paths] or [_measure(given, json_path)]
        if picture is not None:
            caches = given.get("caches", "").split(",") if paths else []
            plot(results, picture, list(filter(None, caches)))
    except FP8KVError as error:
        sys.exit(f"error: {error}")
    for result in results:
        show_result(result, format_table, None if paths else json_path)


def _measure(given: dict[str, Any], json_path: str | None) -> Result:
    thorough = given.pop("thorough", False)
    for name in ("positions", "kinds", "tasks", "caches"):
        if name in given:
            parts = [part.strip() for part in given[name].split(",") if given[name] != "none"]
            given[name] = list(map(int, parts)) if name == "positions" else parts
    save = None if json_path in (None, "-") else Path(str(json_path))
    with show_progress() as report:
        arguments = {**(THOROUGH if thorough else {}), **given}
        return with_model(run_long_suite)(**arguments, save=save, progress=report)


def _load(path: str) -> Result:
    try:
        result: Any = json.loads(Path(path).read_text())
        if result["suite"] == "long" and "tasks" in result:
            return dict(result)
    except (ValueError, KeyError, TypeError, OSError):
        pass
    raise ConfigError(f"--from: expected a result of this benchmark, got {path!r}")


if __name__ == "__main__":
    main()
