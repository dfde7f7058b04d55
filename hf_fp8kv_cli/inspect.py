"""`hf-fp8kv inspect`, which shows static scales, or the storage of a saved cache."""

import json
from contextlib import suppress
from pathlib import Path

from . import arguments
from .shared import WarningLog, handle_log, make_console


def inspect(scales: arguments.Scales, as_json: arguments.Json = False) -> None:
    """Show static scales: a row for K and a row for V of each layer, and remarks on unusual scales.

    For the file of a saved cache, show how each layer is stored.
    """
    from hf_fp8kv import KVScales

    from .scales_table import describe_layers, describe_scales, list_remarks, render_scales

    with handle_log(log := WarningLog()):
        if _is_saved_cache(scales):
            _show_cache(scales, as_json)
            return
        # Faulty scales are shown with warnings. Unreadable scales raise an error.
        kv_scales = KVScales.from_pretrained(scales, strict=False)
    if as_json:
        details = {
            "layers": describe_layers(kv_scales),
            "remarks": list(list_remarks(kv_scales)),
            "warnings": log.messages,
        }
        print(json.dumps(describe_scales(kv_scales) | details))
        return
    console = make_console(piped_width=160)
    console.print(*render_scales(kv_scales, console.width), sep="\n")


def _is_saved_cache(path: str) -> bool:
    from hf_fp8kv.errors import ScaleError
    from hf_fp8kv.utils.files import CACHE_FORMAT, read_header

    with suppress(ScaleError):  # the caller then reads scales, and reports the error
        return Path(path).is_file() and read_header(Path(path))[1].get("format") == CACHE_FORMAT
    return False


def _show_cache(path: str, as_json: bool) -> None:
    from hf_fp8kv import FP8PagedCache
    from hf_fp8kv.utils.terminal import build_table, format_size

    cache = FP8PagedCache.load(path)
    footprint = cache.memory_footprint()
    layers = {str(index): list(map(str, plan)) for index, plan in cache.plan.items()}
    if as_json:
        print(json.dumps({"origin": path, **vars(footprint), "layers": layers}))
        return
    table = build_table(
        dict.fromkeys(("layer", "K stored as", "V stored as"), "left"),
        ((index, *sides) for index, sides in layers.items()),
    )
    print(f"{cache}\n{footprint.tokens} tokens, {format_size(footprint.used_bytes)} in pages")
    make_console(piped_width=160).print(table)
