"""Full rows: products of few tokens that round like those of many.

A library of matrix products has other code for a few rows than for many, which adds in another
order. In float32 on a CPU a text that is read token by token then differs from the same text read
at once in the last bit, and rounding to 8 bits makes much of that bit where it decides a code.
"""

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

Tensor = torch.Tensor

# MKL takes its code for few rows below 4 for each thread, and leaves the last thread a rest: from
# 12 rows on every row was the same in calls of any size, with 1 to 8 threads.
ROWS = 16


def install_full_rows(model: torch.nn.Module) -> None:
    """Let the linear modules of a model compute at least `ROWS` rows, of float32 on a CPU."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and _is_concerned(module.weight):
            module.register_forward_pre_hook(_fill_up)
            module.register_forward_hook(_cut_off)


def remove_full_rows(model: torch.nn.Module) -> None:
    """Undo `install_full_rows`, also of a copy of the model."""
    for module in model.modules():
        hooks: tuple[Any, ...] = module._forward_pre_hooks, module._forward_hooks
        for registered in hooks:
            for number, hook in list(registered.items()):
                if hook in (_fill_up, _cut_off):
                    del registered[number]


def _is_concerned(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _fill_up(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Add an axis in front, and zeros along it up to `ROWS` rows."""
    if not args or not _is_concerned(args[0]):
        return None
    states: Tensor = args[0][None]
    if missing := (ROWS - 1) // max(states.shape[:-1].numel(), 1):
        states = torch.nn.functional.pad(states, (0, 0) * (states.ndim - 1) + (0, missing))
    return states, *args[1:]


def _cut_off(module: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    return output[0] if args and _is_concerned(args[0]) else None
