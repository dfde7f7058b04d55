"""Latent attention (MLA): queries and results are projected, not the history.

A model of this kind caches a latent `c` for each token, `[R]`, and a key part with its position,
`[P]`, both shared by all heads, and expands the whole history at each step: K = [W_K c, position],
V = W_V c. But q · (W_K c) = (W_K' q) · c, and the sum of p_j W_V c_j is W_V times that of p_j c_j
(DeepSeek-V2, arXiv 2405.04434, section 2.1). So `ops.attend` reads the latents as they are stored,
as keys and as values, and W_K, W_V are applied to what is new only.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..cache.paged_tensor import PagedKV
from ..modeling.methods import ModelMethod
from ..modeling.model_support import ATTENTION, EXPAND
from .deterministic import in_blocks

# An attribute of attention modules: whether they leave stored latents to "fp8_paged".
_PASSES = "_hf_fp8kv_latent"
# That of the weights of a projection that are not at hand, and what they were found for.
_ABSORBED = "_hf_fp8kv_absorbed"
# What the algebra needs to know of a module.
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PROJECTION = "kv_b_proj"
# What latents come from.
_NORM = "kv_a_layernorm"
# Heads that a CPU multiplies at a time, of 16 bits.
_HEADS = 16
# Relative RMS up to which a module's own expansion is the one above, in its dtype.
_CLOSE = 0.02
# The attributes of PEFT's layers that say what they add.
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


class Projections:
    """W_K and W_V of an attention module, for each head.

    Attributes:
        key: `[H, N, R]`: latents to keys without their positions.
        value: `[H, V, R]`: latents to values.
    """

    def __init__(self, weight: Tensor, key_dim: int, value_dim: int) -> None:
        """Take `weight`, `[H * (N + V), R]`, apart; nothing is copied."""
        both = weight.view(-1, key_dim + value_dim, weight.shape[1])
        self.key, self.value = both.split([key_dim, value_dim], 1)

    def absorb(self, query: Tensor, deterministic: bool = False) -> Tensor:
        """Return queries of latents, `[B, H, T, R + P]`, for those of keys, `[B, H, T, N + P]`."""
        dim = self.key.shape[1]
        batch, heads, tokens, _ = query.shape
        rows = query[..., :dim].transpose(0, 1).reshape(heads, batch * tokens, dim)
        compute = in_blocks if deterministic else _at_once
        absorbed = compute(lambda part: _multiply(part, self.key), rows, 1)
        absorbed = absorbed.reshape(heads, batch, tokens, -1).transpose(0, 1)
        return torch.cat([absorbed, query[..., dim:]], -1)

    def expand(self, attended: Tensor, deterministic: bool = False) -> Tensor:
        """Return `[B, T, H, V]` for sums of latents, `[B, T, H, R]`."""
        batch, tokens, heads, _ = attended.shape
        columns = attended.permute(2, 3, 0, 1).flatten(2)
        # A CPU multiplies a transposed 16-bit matrix many times slower.
        compute = in_blocks if deterministic else _at_once
        expanded = compute(lambda part: _multiply(self.value, part.contiguous()), columns, 2)
        return expanded.permute(2, 0, 1).reshape(batch, tokens, heads, -1)

    def pays(self, tokens: int, length: int) -> bool:
        """Return whether `tokens` queries over a history of `length` take fewer products so.

        Of each head, expanded and absorbed: `length * R * (N + V) + tokens * length * (N + V)`, and
        `tokens * R * (N + V) + tokens * length * 2 * R`. (Positions are the same in both.)
        """
        rank: int = self.key.shape[2]
        both: int = self.key.shape[1] + self.value.shape[1]
        absorbed = tokens * rank * both + tokens * length * 2 * rank
        return absorbed < length * rank * both + tokens * length * both


def _at_once(compute: Callable[[Tensor], Tensor], rows: Tensor, _axis: int) -> Tensor:
    return compute(rows)


def _multiply(one: Tensor, other: Tensor) -> Tensor:
    """Return the products of matrices of each head, `[H, ., .]`."""
    if not one.is_cpu or one.element_size() > 2 or torch.compiler.is_compiling():
        return torch.bmm(one, other)
    # Of 16 bits, torch copies the weights of one half: copies of a few heads stay in the cache.
    pairs = zip(one.split(_HEADS), other.split(_HEADS), strict=True)
    return torch.cat([torch.bmm(*pair) for pair in pairs])


def install(module: Any, like: Tensor | None = None) -> None:
    """Let a module that expands latents leave stored ones to "fp8_paged", if it can; on itself.

    `like`: a tensor as its latents are, where its weights do not tell the dtype; None: as its norm.
    """
    if not hasattr(type(module), EXPAND) or torch.compiler.is_compiling():
        return
    if _PASSES in vars(module) or EXPAND in vars(module):
        return
    projection = getattr(module, _PROJECTION, None)
    plain = _plain_weight(projection)
    if plain is not None:
        like = plain  # under autocast K is not what latents are
    elif like is None:
        like = getattr(getattr(module, _NORM, None), "weight", None)
    if like is None or like.is_meta:
        return
    passes = _expands_as_here(module, like)
    if passes is not None:
        vars(module)[_PASSES] = passes
    if passes:
        _PassStored(module).install()


def install_all(model: torch.nn.Module) -> None:
    """Do so for every module of a model."""
    for module in model.modules():
        install(module)


@contextmanager
def kept_as_is(model: torch.nn.Module) -> Iterator[None]:
    """Remove from a model what is installed meanwhile."""
    before = {module for module in model.modules() if _PASSES in vars(module)}
    try:
        yield
    finally:
        remove_all(model, before)


def remove_all(model: torch.nn.Module, kept: Collection[torch.nn.Module] = ()) -> None:
    """Let modules of a model, except `kept`, expand latents as their classes do."""
    for module in model.modules():
        if module not in kept and vars(module).pop(_PASSES, False):
            for name in (EXPAND, _ABSORBED):
                vars(module).pop(name, None)


def passes_latents(module: Any) -> bool:
    """Return whether a module leaves stored keys and values, latents and positions, as they are."""
    return bool(vars(module).get(_PASSES))


class _PassStored(ModelMethod):
    """A module's `expand_kv` that returns stored latents as they are."""

    name = EXPAND

    def __call__(self, latent: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        module = self.model
        stored = isinstance(latent, PagedKV) and isinstance(positions, PagedKV)
        if stored and module.config._attn_implementation.startswith(ATTENTION):
            return latent, positions
        return expand(module, latent, positions)


def expand(module: Any, latent: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return K `[B, H, n, N + P]` and V `[B, H, n, V]`, as the module's class expands latents."""
    both: tuple[Tensor, Tensor] = getattr(type(module), EXPAND)(module, latent, positions)
    return both


def needs_gradient(module: Any, query: Tensor) -> bool:
    """Return whether a gradient is asked for, of queries or of what expands latents."""
    if not torch.is_grad_enabled():
        return False
    weights = getattr(module, _PROJECTION).parameters()
    return query.requires_grad or any(weight.requires_grad for weight in weights)


def find_projections(module: Any, like: Tensor) -> Projections | None:
    """Return the projections of a module for latents like this; None: it has to expand them."""
    projection = getattr(module, _PROJECTION)
    weight = _plain_weight(projection)
    if weight is None:
        weight = _weight_by_identity(module, projection, like)
    if weight is None or weight.dtype != like.dtype or weight.device != like.device:
        return None
    return Projections(weight, module.qk_nope_head_dim, module.v_head_dim)


def _plain_weight(projection: Any) -> Tensor | None:
    """Return the weight of a linear module that does nothing but multiply by it; None: another."""
    if type(projection) is not torch.nn.Linear or getattr(projection, "bias", None) is not None:
        return None
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    weight: Tensor = projection.weight
    # accelerate's hooks are a `forward` of the instance.
    if hooks or "forward" in vars(projection) or type(weight) not in (torch.nn.Parameter, Tensor):
        return None
    return weight.detach()


def _weight_by_identity(module: Any, projection: Any, like: Tensor) -> Tensor | None:
    """Return the weight that a projection multiplies by, as its own forward shows it.

    Of quantized weights, adapters, parts of a tensor-parallel one. It is kept until any of its
    tensors changes; compiled code, which cannot tell, asks at each step. None where the forward
    does more than multiply, or changes from call to call.
    """
    known: _Absorbed | None = vars(module).get(_ABSORBED)
    rank = module.kv_lora_rank
    if torch.compiler.is_compiling():
        if known is None or known.weight is None:
            return None
        with torch.no_grad():
            unit = torch.eye(rank, dtype=like.dtype, device=like.device)
            return projection(unit).T.contiguous()  # type: ignore[no-any-return]
    # Such hooks may take arguments of each call, as PEFT's do that choose an adapter for each text.
    if any(part._forward_pre_hooks_with_kwargs for part in projection.modules()):
        return None
    tensors = [*projection.parameters(), *projection.buffers()]
    # Layers of packed weights may have no tensors that they tell of.
    parts = [projection, *tensors]
    state = _state(projection, tensors, like)
    if known is None or not known.is_of(state, parts):
        weight = None
        if not projection.training:
            with torch.no_grad():
                # Numbers of both signs and several sizes, and none.
                tries = torch.arange(3 * rank, device="cpu").cos().view(3, -1)
                tries = (tries * torch.tensor([[0.0], [1.0], [8.0]], device="cpu")).to(like)
                weight = projection(torch.eye(rank, device="cpu").to(like)).T.contiguous()
                if not all(map(_is_close, projection(tries), tries @ weight.T)):
                    weight = None
        known = vars(module)[_ABSORBED] = _Absorbed(state, parts, weight)
    return known.weight


class _Absorbed:
    """The weight that a projection multiplies by, and what it was found for; copies are empty.

    Attributes:
        weight: `[H * (N + V), R]`; None: it does more than multiply.
    """

    def __init__(
        self, state: object = None, parts: Iterable[Any] = (), weight: Tensor | None = None
    ) -> None:
        self._state, self._parts = state, [weakref.ref(part) for part in parts]
        self.weight = weight

    def is_of(self, state: object, parts: list[Any]) -> bool:
        """Return whether it was found for this projection and these tensors, in this state."""
        if state != self._state or len(parts) != len(self._parts):
            return False
        return all(ref() is part for ref, part in zip(self._parts, parts, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Absorbed, ()


def _state(projection: Any, tensors: list[Tensor], like: Tensor) -> tuple[Any, ...]:
    """Return what a product depends on: what its tensors hold, hooks, and PEFT's adapters."""
    parts = list(projection.modules())
    held = [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
    hooks = [key for x in parts for key in (*x._forward_hooks, *x._forward_pre_hooks)]
    adapters = [str(getattr(part, name, None)) for part in parts for name in _ADAPTERS]
    return like.dtype, like.device, projection.training, *held, *hooks, *adapters


def _expands_as_here(module: Any, like: Tensor) -> bool | None:
    """Return whether the module's class expands latents as this file says: tried on two tokens.

    None: that is not known yet, as in training, or while the dtypes differ (autocast).
    """
    if not all(isinstance(getattr(module, name, None), int) for name in _SIZES):
        return False
    if not isinstance(getattr(module, _PROJECTION, None), torch.nn.Module):
        return False
    rank, positions = module.kv_lora_rank, module.qk_rope_head_dim
    with torch.no_grad():
        projections = find_projections(module, like)
        if projections is None:
            return None
        # Not random: the state of the generator is the user's.
        numbers = torch.arange(2 * (rank + positions), device=like.device).cos().to(like.dtype)
        latent, position = numbers.view(1, 1, 2, -1).split([rank, positions], -1)
        key, value = expand(module, latent, position)
        same_key = torch.einsum("abtr,hnr->ahtn", latent, projections.key)
        same_value = torch.einsum("abtr,hvr->ahtv", latent, projections.value)
        same_key = torch.cat([same_key, position.expand(-1, same_key.shape[1], -1, -1)], -1)
        return _is_close(key, same_key) and _is_close(value, same_value)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two results are the same up to rounding."""
    if one.shape != other.shape:
        return False
    gap, size = (float(x.float().norm()) for x in (one - other, other))
    return gap <= _CLOSE * size
