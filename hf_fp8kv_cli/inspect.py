"""`hf-fp8kv inspect`, which shows static scales."""

import json

from . import arguments
from .shared import WarningLog, handle_log, make_console


def inspect(scales: arguments.Scales, as_json: arguments.Json = False) -> None:
    """Show static scales: two rows for each layer, and remarks on unusual scales."""
    from hf_fp8kv import KVScales

    from .scales_table import describe_layers, describe_scales, list_remarks, render_scales

    with handle_log(log := WarningLog()):
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
