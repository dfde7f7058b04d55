"""Deterministic models: a token's numbers do not depend on what it is computed with.

A library of matrix products has other code for other numbers of rows, which adds in another order.
So linear modules compute blocks of `ROWS` rows, whatever the call has: each product has one shape.
Attention over pages has the same bits in any call (`AttentionSpec.deterministic`), and pages hold
what was computed before, so a last bit never decides another code.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ConfigError
from ..modeling.methods import ModelMethod, remove_methods
from ..modeling.model_support import DETERMINISTIC, EXPAND, moving_rope

# Rows of a block. More of them take longer for one token, fewer for a prompt.
ROWS = 16
# Numbers of a block of an activation: fewer than torch gives to a second thread. Vectors have at
# most `_LINE` numbers; torch computes the rest of a line by other code.
_NUMBERS, _LINE = 1 << 14, 64
# The attribute of a model: who made it deterministic.
_OWNERS = "_hf_fp8kv_deterministic_for"
_FORWARDS = (torch.nn.Linear.forward, Conv1D.forward)
# Classes of transformers that choose experts, or hold the matrices of all of them.
_EXPERTS = re.compile("Router|Gate|Experts")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


def check_deterministic(model: PreTrainedModel, others: Sequence[int] = ()) -> None:
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
    elif model.dtype == torch.float64:
        why = "has weights in float64"
    elif moving := moving_rope(model.config):
        why = f"has RoPE of the type {moving!r}, which depends on the longest text"
    for name, module in model.named_modules():
        if not why and _has_matrices(module) and _method_for(module) is None:
            why = f"has products outside of linear modules ({name}: {type(module).__name__})"
    if why:
        raise ConfigError(
            "deterministic: expected a decoder whose layers are all stored, got "
            f"{type(model).__name__}, which {why}; leave deterministic out"
        )


def install_deterministic(model: PreTrainedModel, owner: str) -> None:
    """Let modules compute in blocks of one size, and attention be deterministic."""
    owners = vars(model).setdefault(_OWNERS, [])
    if not owners:
        for module, method in _methods(model):
            method(module).install()
        for module in model.modules():
            vars(module)[DETERMINISTIC] = True
        model.register_forward_pre_hook(_check_whole)
    owners.append(owner)


def remove_deterministic(model: Any, owner: str) -> None:
    """Undo `install_deterministic`, once no other owner is left."""
    owners = vars(model).get(_OWNERS, [])
    if owner in owners:
        owners.remove(owner)
    if owners or vars(model).pop(_OWNERS, None) is None:
        return
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _check_whole:
            del model._forward_pre_hooks[number]
    for module in model.modules():
        vars(module).pop(DETERMINISTIC, None)
        if isinstance(vars(module).get("forward"), _Forward):
            remove_methods(module)


def _check_whole(model: Any, _args: Any) -> None:
    """Raise ConfigError if a module was added or replaced since `install_deterministic`."""
    if DETERMINISTIC not in vars(model):  # suspended, see `eval_mode`
        return
    if all(DETERMINISTIC in vars(module) for module in model.modules()):
        return
    for module, _ in _methods(model):
        if DETERMINISTIC not in vars(module):
            raise ConfigError(
                "deterministic: expected the modules that enable() saw, got another "
                f"{type(module).__name__}; call enable() after adapters are added"
            )


def _methods(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, "type[_Forward]"]]:
    """Yield the modules that compute in blocks, and how."""
    # Queries and results are multiplied by the weight of this projection, not the history.
    absorbed = {id(x.kv_b_proj) for x in model.modules() if hasattr(type(x), EXPAND)}
    for module in model.modules():
        if id(module) not in absorbed and (method := _method_for(module)) is not None:
            yield module, method


def _method_for(module: torch.nn.Module) -> "type[_Forward] | None":
    """Return how a module computes in blocks, or None."""
    kind, leaf = type(module), not any(True for _ in module.children())
    if _EXPERTS.search(kind.__name__) and _has_matrices(module):
        return _TokenByToken
    if kind.forward in _FORWARDS:
        return _InBlocks
    # Where torch reduces rows of a GPU, their number decides the order of sums.
    if leaf and "Norm" in kind.__name__ and any(not x.is_cpu for x in module.parameters()):
        return _InBlocks
    return _Elementwise if leaf and kind.__module__ in _ACTIVATIONS else None


def _has_matrices(module: torch.nn.Module) -> bool:
    """Return whether a module may multiply matrices: not an embedding, which looks up rows."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    matrices = isinstance(module, torch.nn.Linear | Conv1D) or any(x.ndim > 1 for x in own)
    return matrices and not isinstance(module, torch.nn.Embedding)


class _Forward(ModelMethod):
    name = "forward"


class _InBlocks(_Forward):
    """The forward of a linear module or a norm, block by block."""

    def __call__(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            _refuse_compilation()
        forward, rows = self.stock, states.reshape(-1, states.shape[-1])
        out = in_blocks(lambda block: forward(block, *args, **kwargs), rows)
        return out.view(*states.shape[:-1], out.shape[-1])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compilation() -> None:
    """Raise ConfigError at run time: Dynamo would leave a traced `raise` out."""
    raise ConfigError(
        "deterministic: expected a model that is not compiled, got torch.compile, whose code "
        "adds in other orders; leave one of them out"
    )


class _TokenByToken(_Forward):
    """The forward of experts or of their router, token by token.

    How many tokens an expert gets depends on the call.
    """

    def __call__(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward, count = self.stock, states.shape[:-1].numel()

        def run(i: int) -> Any:
            def pick(x: Any) -> Any:
                return x[i : i + 1] if isinstance(x, Tensor) and x.shape[:1] == (count,) else x

            more, named = tree_map(pick, (args, kwargs))
            return forward(states.reshape(count, -1)[i : i + 1], *more, **named)

        if not count:
            return forward(states, *args, **kwargs)
        return tree_map(lambda *parts: torch.cat(parts), *map(run, range(count)))


class _Elementwise(_Forward):
    """The forward of an activation, whose numbers depend on no other, in lines and blocks."""

    def __call__(self, states: Tensor) -> Tensor:
        forward, numbers = self.stock, states.reshape(-1)
        padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % _LINE))
        out = torch.cat([forward(part) for part in padded.split(_NUMBERS)])
        return out[: len(numbers)].view(states.shape)


def in_blocks(compute: Callable[[Tensor], Tensor], rows: Tensor, axis: int = 0) -> Tensor:
    """Apply `compute` to blocks of `ROWS` rows, of which the last one is filled up with zeros."""
    count = rows.shape[axis]
    if missing := -count % ROWS:
        shape = [*rows.shape]
        shape[axis] = missing
        rows = torch.cat([rows, rows.new_zeros(shape)], axis)
    return torch.cat([compute(part) for part in rows.split(ROWS, axis)], axis).narrow(
        axis, 0, count
    )
