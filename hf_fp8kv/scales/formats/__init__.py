"""Readers of static KV scales: JSON and safetensors, never a pickle.

What the dialects have in common is code, and what sets them apart is a row of `ROWS`: how the
tensors are called, which side they give, and under which config they mean what they say. A writer
reads the same rows the other way (`Row.name`).

A reader ends in scales that were checked, or in a `ScaleError` that says what was looked for.
"""

from .config import Declaration, declaration
from .read import read_checkpoint, read_file
from .request import Request
from .tensor_names import ROWS, Row
from .vllm_json import JSON_FILE

__all__ = [
    "JSON_FILE",
    "ROWS",
    "Declaration",
    "Request",
    "Row",
    "declaration",
    "read_checkpoint",
    "read_file",
]
