"""Tensors inside of other objects, and without gradients."""

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


def without_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or, if it has a gradient, one on the same numbers without.

    (`detach` takes ten times as long, and a decode step has four tensors to ask for in each layer.)
    """
    return tensor.detach() if tensor.requires_grad else tensor
