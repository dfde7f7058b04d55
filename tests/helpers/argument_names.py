"""Write examples with the names of the installed transformers."""

import re

from hf_fp8kv.modeling.model_support import CACHE


def rename_arguments(source: str) -> str:
    """Return code for transformers 5.24 with the names that the installed version accepts."""
    if CACHE == "cache":
        return source
    source = re.sub(r"(?<=[ (])cache=(?=\w)", f"{CACHE}=", source)
    return source.replace("result.cache", f"result.{CACHE}")
