"""Deterministic models: a token's numbers do not depend on what it is computed with.

A library of matrix products has other code for other numbers of rows, which adds in another order.
So linear modules compute blocks of `ROWS` rows, whatever the call has: each product has one shape.
Attention over pages has the same bits in any call (`AttentionSpec.deterministic`), and pages hold
what was computed before, so a last bit never decides another code.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..cache.options import CacheOptions
from ..errors import ConfigError
from ..modeling.methods import ModelMethod, remove_methods
from ..modeling.model_support import DETERMINISTIC, EXPAND
from ..ops import choose_backend

# Rows of a block. More of them take longer for one token, fewer for a prompt.
ROWS = 16
# The attribute of a model: who made it deterministic.
_OWNERS = "_hf_fp8kv_deterministic_for"
_LINEAR = (torch.nn.Linear, Conv1D)
# Classes of transformers that choose experts, or hold the matrices of all of them.
_EXPERTS = re.compile("Router|Gate|Experts")


def check_deterministic(
    model: PreTrainedModel, options: CacheOptions, others: Sequence[int] = ()
) -> None:
    """Raise ConfigError unless all that mixes the tokens of a call is known to be deterministic.

    `others`: layers that are not stored in pages.
    """
    why = ""
    if model.config.is_encoder_decoder:
        why = "is an encoder-decoder"
    elif not model._can_set_attn_implementation():
        why = "does not look its attention function up"
    elif others:
        why = f"has layers that are not stored in pages ({', '.join(map(str, others))})"
    elif (backend := choose_backend(options.backend, model.device)) != "cpu":
        why = f"runs on the backend {backend!r}, for which nothing is promised yet"
    for name, module in model.named_modules():
        if _has_matrices(module) and not _EXPERTS.search(kind := type(module).__name__):
            why = f"has products outside of linear modules ({name}: {kind})"
    if why:
        raise ConfigError(
            "deterministic: expected a decoder on a CPU whose layers are all stored, got "
            f"{type(model).__name__}, which {why}; leave deterministic out"
        )


def install_deterministic(model: PreTrainedModel, owner: str) -> None:
    """Let linear modules compute in blocks of rows, and attention be deterministic."""
    owners = vars(model).setdefault(_OWNERS, [])
    if not owners:
        for module in model.modules():
            vars(module)[DETERMINISTIC] = True
            # Queries and results are multiplied by the weight of this projection, not the history.
            absorbed = {id(module.kv_b_proj)} if hasattr(type(module), EXPAND) else set()
            for part in module.children():
                if isinstance(part, _LINEAR) and id(part) not in absorbed:
                    _InBlocks(part).install()
                elif _has_matrices(part):
                    _TokenByToken(part).install()
    owners.append(owner)


def remove_deterministic(model: Any, owner: str) -> None:
    """Undo `install_deterministic`, once no other owner is left."""
    owners = vars(model).get(_OWNERS, [])
    if owner in owners:
        owners.remove(owner)
    if not owners and vars(model).pop(_OWNERS, None) is not None:
        for module in model.modules():
            vars(module).pop(DETERMINISTIC, None)
            if isinstance(module, _LINEAR) or _has_matrices(module):
                remove_methods(module)


class _InBlocks(ModelMethod):
    """The forward of a linear module, block by block."""

    name = "forward"

    def __call__(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            _refuse_compilation()
        forward, rows = self.stock, states.reshape(-1, states.shape[-1])
        out = in_blocks(lambda block: forward(block, *args, **kwargs), rows)
        return out.view(*states.shape[:-1], out.shape[-1])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compilation() -> None:  # not traced, as a `raise` would be, and then left out
    raise ConfigError(
        "deterministic: expected a model that is not compiled, got torch.compile, whose code "
        "adds in other orders; leave one of them out"
    )


class _TokenByToken(ModelMethod):
    """The forward of experts or of their router, token by token.

    How many tokens an expert gets depends on the call.
    """

    name = "forward"

    def __call__(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = states.shape[:-1].numel()

        def run(i: int) -> Any:
            def pick(x: Any) -> Any:
                return x[i : i + 1] if isinstance(x, Tensor) and x.shape[:1] == (count,) else x

            more, named = tree_map(pick, (args, kwargs))
            return self.stock(states.reshape(count, -1)[i : i + 1], *more, **named)

        return tree_map(lambda *parts: torch.cat(parts), *map(run, range(count)))


def _has_matrices(module: torch.nn.Module) -> bool:
    """Return whether a module has matrices, and is neither linear nor an embedding."""
    known = isinstance(module, (*_LINEAR, torch.nn.Embedding))
    return not known and any(x.ndim > 1 for x in module.parameters(recurse=False))


def in_blocks(compute: Callable[[Tensor], Tensor], rows: Tensor, axis: int = 0) -> Tensor:
    """Return what `compute` makes of blocks of `ROWS` rows, the last one filled up with zeros."""
    count = rows.shape[axis]
    if missing := -count % ROWS:
        shape = [*rows.shape]
        shape[axis] = missing
        rows = torch.cat([rows, rows.new_zeros(shape)], axis)
    return torch.cat([compute(part) for part in rows.split(ROWS, axis)], axis).narrow(
        axis, 0, count
    )
