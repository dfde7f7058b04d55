"""Deterministic models: the results of a token do not depend on the other tokens of a call.

Libraries for matrix products use different code, with a different order of sums, for different
numbers of rows. Linear modules therefore compute blocks of `ROWS` rows in every call, so that each
product has the same shape. Attention over pages has the same bits in any call
(`AttentionSpec.deterministic`). Stored keys and values are never recomputed, so a last bit cannot
change a code.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..cache.cache import FP8PagedCache
from ..errors import ConfigError
from ..modeling.methods import ModelMethod, remove_methods
from ..modeling.model_support import ATTENTION, CACHE, DETERMINISTIC, EXPAND, moving_rope

# Minimum number of slots per page.
LEAST_PAGE = 16
# Rows of a block. More rows make a single token slower, and fewer make a prompt slower.
ROWS = 16
# Values per block of an activation, few enough that torch uses a single thread. A vector register
# holds at most `_LINE` values, and torch uses different code for the remainder of a line.
_BLOCK_VALUES, _LINE = 1 << 14, 64
# Attribute of a model that lists the callers of `install_deterministic`.
_OWNERS = "_hf_fp8kv_deterministic_for"
_FORWARDS = (torch.nn.Linear.forward, Conv1D.forward)
# Classes of transformers that select experts, or hold the matrices of all experts.
_EXPERTS = re.compile("Router|Gate|Experts")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_NO_ACTIVATIONS = re.compile("Softmax|Softmin|LogSoftmax|Softmax2d|GLU|PReLU|MultiheadAttention")
# Elementwise functions with different code for the remainder of a vector.
_ELEMENTWISE = frozenset(
    ("celu", "elu", "erf", "expm1", "gelu", "log1p", "log_sigmoid_forward", "mish", "sigmoid",
     "silu", "softplus")
)  # fmt: skip
_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "mm"))


def check_deterministic(model: PreTrainedModel, stock: Sequence[int] = ()) -> None:
    """Raise ConfigError if a model, or one of its `stock` layers, may not be deterministic."""
    why = ""
    if model.config.is_encoder_decoder:
        why = "is an encoder-decoder"
    elif not model._can_set_attn_implementation():
        why = "does not use transformers' attention registry"
    elif stock:
        why = f"has layers that are not stored in pages ({', '.join(map(str, stock))})"
    elif model.dtype == torch.float64:
        why = "has weights in float64"
    elif getattr(model.config, "index_topk", None) is not None:
        why = "selects keys by products outside linear modules"
    elif moving := moving_rope(model.config):
        why = f"has RoPE of the type {moving!r}, which depends on the longest sequence"
    for name, module in model.named_modules():
        if not why and _has_matrices(module) and _method_for(module) is None:
            why = f"has products outside linear modules ({name}: {type(module).__name__})"
    if why:
        raise ConfigError(
            "deterministic: expected a decoder whose layers are all stored, got "
            f"{type(model).__name__}, which {why}; leave deterministic out"
        )


def check_page_size(page_size: int) -> None:
    """Raise ConfigError for pages smaller than an AVX-512 vector, which reorder sums."""
    if page_size < LEAST_PAGE:
        raise ConfigError(
            f"deterministic: expected pages of {LEAST_PAGE} tokens or more, got page_size="
            f"{page_size}; leave page_size out"
        )


def check_padding(present: Tensor) -> None:
    """Raise ConfigError if a sequence of a deterministic model has padding before its last token.

    Padding would change where tokens are stored, and with it the order of sums. `present` is
    `[B, N]`.
    """
    if (present.int().diff() > 0).any():
        raise ConfigError(
            "deterministic: expected sequences that begin at the first position, got padding "
            "before or inside them; use hf_fp8kv.serving and generate_batch, which need no "
            "padding, or sequences of equal length"
        )


def install_deterministic(model: PreTrainedModel, owner: str) -> None:
    """Make modules compute in blocks of a fixed size, and attention deterministic."""
    owners = vars(model).setdefault(_OWNERS, [])
    if not owners:
        # The weight of this projection is multiplied by queries and results, without its module.
        absorbed = {id(x.kv_b_proj) for x in model.modules() if hasattr(type(x), EXPAND)}
        for module in model.modules():
            vars(module)[DETERMINISTIC] = True
            if id(module) not in absorbed and (method := _method_for(module)) is not None:
                method(module).install()
        # PEFT calls `forward` and some trainers call the decoder, without hooks of the model.
        for part in {model, model.base_model}:
            part.register_forward_pre_hook(_check_call, with_kwargs=True)
    owners.append(owner)


def remove_deterministic(model: Any, owner: str) -> None:
    """Undo `install_deterministic` if no other owner is left."""
    owners = vars(model).get(_OWNERS, [])
    if owner in owners:
        owners.remove(owner)
    if owners or vars(model).pop(_OWNERS, None) is None:
        return
    for module in model.modules():
        vars(module).pop(DETERMINISTIC, None)
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is _check_call:
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        if isinstance(vars(module).get("forward"), _Forward):
            remove_methods(module)


def _check_call(model: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Raise ConfigError for a call that is not deterministic, before it changes anything.

    A padded call without a cache or position ids gets position ids that skip the padding.
    """
    if DETERMINISTIC not in vars(model):  # suspended, see `eval_mode`
        return None
    if torch.compiler.is_compiling():
        _refuse_compilation()
    for module in model.modules():
        if DETERMINISTIC not in vars(module) and (_has_matrices(module) or _method_for(module)):
            raise ConfigError(
                "deterministic: expected the modules that enable() prepared, got a new "
                f"{type(module).__name__}; call enable() after adapters are added"
            )
    if model.dtype == torch.float64:
        raise ConfigError("deterministic: expected 16 or 32 bits, got a model in float64")
    # A cache without layers is falsy, so compare with None.
    caches = [given[x] for x in (CACHE, "past_key_values") if given.get(x) is not None]
    mask: Any = given.get("attention_mask")
    is_padded = isinstance(mask, Tensor) and mask.ndim == 2
    for cache in caches:
        if isinstance(cache, FP8PagedCache):
            name = str(model.config.get_text_config(decoder=True)._attn_implementation)
            if not name.startswith(ATTENTION):
                raise ConfigError(
                    f"deterministic: expected the attention {ATTENTION!r}, got {name!r}; call "
                    "enable() again"
                )
            cache.options.check_stored("deterministic")
            check_page_size(cache.options.page_size)
            if is_padded:
                check_padding(mask.bool())
    if is_padded and not caches and given.get("position_ids") is None:
        return args, {**given, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}
    return None


def _method_for(module: torch.nn.Module) -> "type[_Forward] | None":
    """Return the class of a module's new `forward`, or None."""
    kind, leaf = type(module), not any(True for _ in module.children())
    # A router may multiply by the weight of one of its modules.
    parts = module.modules() if "Router" in kind.__name__ else [module]
    if _EXPERTS.search(kind.__name__) and any(map(_has_matrices, parts)):
        return _TokenByToken
    if kind.forward in _FORWARDS:
        return _InBlocks
    # On a GPU, the order of sums in torch's reductions depends on the number of rows.
    if leaf and "Norm" in kind.__name__ and any(not x.is_cpu for x in module.parameters()):
        return _InBlocks
    is_elementwise = kind.__module__ in _ACTIVATIONS and not _NO_ACTIVATIONS.fullmatch(
        kind.__name__
    )
    return _Elementwise if leaf and is_elementwise else None


def _has_matrices(module: torch.nn.Module) -> bool:
    """Return whether a module may multiply matrices. An embedding only looks up rows."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    matrices = isinstance(module, torch.nn.Linear | Conv1D) or any(x.ndim > 1 for x in own)
    return matrices and not isinstance(module, torch.nn.Embedding)


class FunctionWatch(TorchDispatchMode):
    """Detects functions whose bits depend on the tensor's size, called on all tokens at once.

    Attributes:
        found: Name of the last such elementwise function or product, or "".
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens, self.found = tokens, ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__.rstrip("_")
        if name in _ELEMENTWISE and args[0].shape[:-1].numel() >= self._tokens:
            self.found = name
        if name in _PRODUCTS:
            one, other = args[-2:]
            # RoPE multiplies single factors, and latent attention blocks of columns.
            is_exact = one.shape[-1] == 1 or other.shape[-1] == ROWS
            if one.shape[-2] >= self._tokens and not is_exact:
                self.found = name
        return function(*args, **(kwargs or {}))


class _Forward(ModelMethod):
    name = "forward"


class _InBlocks(_Forward):
    """The `forward` of a linear module or a norm, block by block."""

    def __call__(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            _refuse_compilation()
        forward, rows = self.stock, states.reshape(-1, states.shape[-1])
        out = in_blocks(lambda block: forward(block, *args, **kwargs), rows)
        return out.view(*states.shape[:-1], out.shape[-1])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compilation() -> None:
    """Raise ConfigError at run time, because Dynamo would drop a traced `raise`."""
    raise ConfigError(
        "deterministic: expected a model that is not compiled, got torch.compile, which changes "
        "the order of sums; leave one of them out"
    )


class _TokenByToken(_Forward):
    """The `forward` of experts or of their router, token by token.

    The number of tokens per expert depends on the call.
    """

    def __call__(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward, count = self.stock, states.shape[:-1].numel()

        def run(i: int) -> Any:
            def pick(x: Any) -> Any:
                # A bias of experts has one axis, whose size may equal the number of tokens.
                each = isinstance(x, Tensor) and x.ndim > 1 and len(x) == count
                return x[i : i + 1] if each and not isinstance(x, torch.nn.Parameter) else x

            picked_args, picked_kwargs = tree_map(pick, (args, kwargs))
            # A copy, because alignment decides the order of sums.
            state = states.reshape(count, -1)[i : i + 1].clone()
            return forward(state, *picked_args, **picked_kwargs)

        if not count:
            return forward(states, *args, **kwargs)
        return tree_map(lambda *parts: torch.cat(parts), *map(run, range(count)))


class _Elementwise(_Forward):
    """The `forward` of an elementwise activation, in lines and blocks."""

    def __call__(self, states: Tensor) -> Tensor:
        forward, values = self.stock, states.reshape(-1)
        padded = torch.nn.functional.pad(values, (0, -len(values) % _LINE))
        out = torch.cat([forward(part) for part in padded.split(_BLOCK_VALUES)])
        return out[: len(values)].view(states.shape)


def in_blocks(compute: Callable[[Tensor], Tensor], rows: Tensor, axis: int = 0) -> Tensor:
    """Apply `compute` to blocks of `ROWS` rows. The last block is padded with zeros.

    Rows are copied, because strides and alignment decide the order of sums.
    """
    count, shape = rows.shape[axis], [*rows.shape]
    shape[axis] = -count % ROWS
    rows = torch.cat([rows, rows.new_zeros(shape)], axis)
    return torch.cat([compute(part) for part in rows.split(ROWS, axis)], axis).narrow(
        axis, 0, count
    )
