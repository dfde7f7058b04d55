"""Tensors inside of other objects."""

from typing import Any

import torch


def collect_tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor in a value made of dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in collect_tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in collect_tensors(item)]
    return []
