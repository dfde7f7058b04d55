"""Rename arguments in examples for the installed version of transformers."""

import re

from hf_fp8kv.modeling.model_support import CACHE


def rename_arguments(source: str) -> str:
    """Return source code for transformers 5.24 with the argument names of older versions.

    If the installed version has the names of 5.24, the code does not change.
    """
    renamed_source = re.sub(r"(?<=[ (])cache=(?=\w)", f"{CACHE}=", source)
    return renamed_source.replace("result.cache", f"result.{CACHE}")
