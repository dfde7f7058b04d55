"""Latent attention (MLA): projections are applied to queries and results, not to stored latents.

Such a model caches a latent `c` `[R]` and a positional key part `[P]` for each token, both shared
by all heads. It expands all of them in each step: K = [W_K c, position], V = W_V c. But q · (W_K c)
= (W_K' q) · c, and the sum of p_j W_V c_j is W_V times the sum of p_j c_j (DeepSeek-V2, arXiv
2405.04434, section 2.1). `ops.attend` therefore reads stored latents as keys and as values, and W_K
and W_V are only applied to queries and results.
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

# Attribute of attention modules: whether they pass stored latents to "fp8_paged" unexpanded.
_READS_STORED = "_hf_fp8kv_latent"
# Attribute that caches the weight of a projection if it had to be computed.
_ABSORBED = "_hf_fp8kv_absorbed"
# Attributes of a module that determine the sizes of W_K and W_V.
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PROJECTION = "kv_b_proj"
# The module that computes latents.
_NORM = "kv_a_layernorm"
# Number of heads that a CPU multiplies at a time in 16 bits.
_HEADS = 16
# Relative RMS error below which a module's expansion counts as equal to the formulas above.
_CLOSE = 0.02
# Attributes of PEFT's layers that determine their effect.
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


class Projections:
    """W_K and W_V of an attention module.

    Attributes:
        key: W_K, from latents to keys without their positional part, `[H, N, R]`.
        value: W_V, from latents to values, `[H, V, R]`.
    """

    def __init__(self, weight: Tensor, key_dim: int, value_dim: int) -> None:
        """Split `weight`, `[H * (N + V), R]`, into views."""
        by_head = weight.view(-1, key_dim + value_dim, weight.shape[1])
        self.key, self.value = by_head.split([key_dim, value_dim], 1)

    def absorb(self, query: Tensor, deterministic: bool = False) -> Tensor:
        """Project queries for keys `[B, H, T, N + P]` to queries for latents `[B, H, T, R + P]`."""
        dim = self.key.shape[1]
        batch, heads, tokens, _ = query.shape
        rows = query[..., :dim].transpose(0, 1).reshape(heads, batch * tokens, dim)
        compute = in_blocks if deterministic else _at_once
        absorbed = compute(lambda part: _multiply(part, self.key), rows, 1)
        absorbed = absorbed.reshape(heads, batch, tokens, -1).transpose(0, 1)
        return torch.cat([absorbed, query[..., dim:]], -1)

    def expand(self, attended: Tensor, deterministic: bool = False) -> Tensor:
        """Project sums of latents, `[B, T, H, R]`, to values, `[B, T, H, V]`."""
        batch, tokens, heads, _ = attended.shape
        columns = attended.permute(2, 3, 0, 1).flatten(2)
        # A CPU is many times slower for a transposed 16-bit matrix.
        compute = in_blocks if deterministic else _at_once
        expanded = compute(lambda part: _multiply(self.value, part.contiguous()), columns, 2)
        return expanded.permute(2, 0, 1).reshape(batch, tokens, heads, -1)

    def pays(self, tokens: int, length: int) -> bool:
        """Return whether the absorbed form needs fewer products than the expanded form.

        For `tokens` queries over `length` tokens, the products per head are
        `length * R * (N + V) + tokens * length * (N + V)` expanded, and
        `tokens * R * (N + V) + tokens * length * 2 * R` absorbed. Positional parts cost the same in
        both.
        """
        rank: int = self.key.shape[2]
        width: int = self.key.shape[1] + self.value.shape[1]
        absorbed = tokens * rank * width + tokens * length * 2 * rank
        return absorbed < length * rank * width + tokens * length * width


def _at_once(compute: Callable[[Tensor], Tensor], rows: Tensor, _axis: int) -> Tensor:
    return compute(rows)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices of each head, `[H, ., .]`."""
    if not a.is_cpu or a.element_size() > 2 or torch.compiler.is_compiling():
        return torch.bmm(a, b)
    # In 16 bits torch copies one of the operands. Copies of a few heads stay in the CPU's cache.
    pairs = zip(a.split(_HEADS), b.split(_HEADS), strict=True)
    return torch.cat([torch.bmm(*pair) for pair in pairs])


def install(module: Any, like: Tensor | None = None) -> None:
    """Make a module pass stored latents to "fp8_paged" unexpanded, if its algebra is absorbed.

    `like` is a tensor with the dtype and device of its latents, used if its weights do not
    determine them. None means the weight of its norm.
    """
    if not hasattr(type(module), EXPAND) or torch.compiler.is_compiling():
        return
    if _READS_STORED in vars(module) or EXPAND in vars(module):
        return
    projection = getattr(module, _PROJECTION, None)
    plain = _plain_weight(projection)
    if plain is not None:
        like = plain  # under autocast K may have a different dtype than latents
    elif like is None:
        like = getattr(getattr(module, _NORM, None), "weight", None)
    if like is None or like.is_meta:
        return
    matches = _has_known_algebra(module, like)
    if matches is not None:
        vars(module)[_READS_STORED] = matches
    if matches:
        _KeepStored(module).install()


def install_all(model: torch.nn.Module) -> None:
    """Call `install` for every module of a model."""
    for module in model.modules():
        install(module)


@contextmanager
def undoing_installs(model: torch.nn.Module) -> Iterator[None]:
    """Undo every `install` on a model's modules within the `with` block."""
    before = {module for module in model.modules() if _READS_STORED in vars(module)}
    try:
        yield
    finally:
        remove_all(model, before)


def remove_all(model: torch.nn.Module, kept: Collection[torch.nn.Module] = ()) -> None:
    """Undo `install` for all modules of a model, except `kept`."""
    for module in model.modules():
        if module not in kept and vars(module).pop(_READS_STORED, False):
            for name in (EXPAND, _ABSORBED):
                vars(module).pop(name, None)


def reads_stored_latents(module: Any) -> bool:
    """Return whether a module passes stored latents and positional parts unexpanded."""
    return bool(vars(module).get(_READS_STORED))


class _KeepStored(ModelMethod):
    """A module's `expand_kv` that returns stored latents unexpanded."""

    name = EXPAND

    def __call__(self, latent: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        module = self.model
        stored = isinstance(latent, PagedKV) and isinstance(positions, PagedKV)
        if stored and module.config._attn_implementation.startswith(ATTENTION):
            return latent, positions
        return expand(module, latent, positions)


def expand(module: Any, latent: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latents by the module's class to K `[B, H, n, N + P]` and V `[B, H, n, V]`."""
    expanded: tuple[Tensor, Tensor] = getattr(type(module), EXPAND)(module, latent, positions)
    return expanded


def needs_gradient(module: Any, query: Tensor) -> bool:
    """Return whether queries or the projection of latents need a gradient."""
    if not torch.is_grad_enabled():
        return False
    weights = getattr(module, _PROJECTION).parameters()
    return query.requires_grad or any(weight.requires_grad for weight in weights)


def find_projections(module: Any, like: Tensor) -> Projections | None:
    """Return the projections of a module for latents like `like`, or None if it must expand."""
    projection = getattr(module, _PROJECTION)
    weight = _plain_weight(projection)
    if weight is None:
        weight = _weight_by_identity(module, projection, like)
    if weight is None or weight.dtype != like.dtype or weight.device != like.device:
        return None
    return Projections(weight, module.qk_nope_head_dim, module.v_head_dim)


def _plain_weight(projection: Any) -> Tensor | None:
    """Return the weight of a module that only multiplies by it, otherwise None."""
    if type(projection) is not torch.nn.Linear or getattr(projection, "bias", None) is not None:
        return None
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    weight: Tensor = projection.weight
    # accelerate implements hooks as a `forward` of the instance.
    if hooks or "forward" in vars(projection) or type(weight) not in (torch.nn.Parameter, Tensor):
        return None
    return weight.detach()


def _weight_by_identity(module: Any, projection: Any, like: Tensor) -> Tensor | None:
    """Return the weight of a projection, computed by applying it to the identity matrix.

    This covers quantized weights, adapters, and shards of a tensor-parallel weight. The result is
    cached until any of the projection's tensors changes. Compiled code cannot detect changes and
    computes it in each step.

    Returns:
        None if the forward does more than multiply, or changes between calls.
    """
    absorbed: _Absorbed | None = vars(module).get(_ABSORBED)
    rank = module.kv_lora_rank
    if torch.compiler.is_compiling():
        if absorbed is None or absorbed.weight is None:
            return None
        with torch.no_grad():
            unit = torch.eye(rank, dtype=like.dtype, device=like.device)
            return projection(unit).T.contiguous()  # type: ignore[no-any-return]
    # Such hooks may use arguments of each call, like PEFT's hooks that select adapters by sequence.
    if any(part._forward_pre_hooks_with_kwargs for part in projection.modules()):
        return None
    tensors = [*projection.parameters(), *projection.buffers()]
    # Layers with packed weights may not list them as parameters or buffers.
    parts = [projection, *tensors]
    state = _state(projection, tensors, like)
    if absorbed is None or not absorbed.is_of(state, parts):
        weight = None
        if not projection.training:
            with torch.no_grad():
                # Test inputs: zeros, and values of both signs and different magnitudes.
                tries = torch.arange(3 * rank, device="cpu").cos().view(3, -1)
                tries = (tries * torch.tensor([[0.0], [1.0], [8.0]], device="cpu")).to(like)
                weight = projection(torch.eye(rank, device="cpu").to(like)).T.contiguous()
                if not all(map(_is_close, projection(tries), tries @ weight.T)):
                    weight = None
        absorbed = vars(module)[_ABSORBED] = _Absorbed(state, parts, weight)
    return absorbed.weight


class _Absorbed:
    """Cached weight of a projection, and the state it was computed for. Copies are empty.

    Attributes:
        weight: The weight, `[H * (N + V), R]`, or None if the projection does more than multiply.
    """

    def __init__(
        self, state: object = None, parts: Iterable[Any] = (), weight: Tensor | None = None
    ) -> None:
        self._state, self._parts = state, [weakref.ref(part) for part in parts]
        self.weight = weight

    def is_of(self, state: object, parts: list[Any]) -> bool:
        """Return whether the weight was computed for these objects in this state."""
        if state != self._state or len(parts) != len(self._parts):
            return False
        return all(ref() is part for ref, part in zip(self._parts, parts, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Absorbed, ()


def _state(projection: Any, tensors: list[Tensor], like: Tensor) -> tuple[Any, ...]:
    """Return everything that a product depends on: tensor versions, hooks, PEFT's adapters."""
    parts = list(projection.modules())
    versions = [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
    hooks = [key for x in parts for key in (*x._forward_hooks, *x._forward_pre_hooks)]
    adapters = [str(getattr(part, name, None)) for part in parts for name in _ADAPTERS]
    return like.dtype, like.device, projection.training, *versions, *hooks, *adapters


def _has_known_algebra(module: Any, like: Tensor) -> bool | None:
    """Test on two tokens whether the module's class expands latents by the formulas above.

    Returns:
        None if this cannot be determined yet, as in training, or if dtypes differ (autocast).
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
        # Not random, to leave the user's random generator unchanged.
        numbers = torch.arange(2 * (rank + positions), device=like.device).cos().to(like.dtype)
        latent, position = numbers.view(1, 1, 2, -1).split([rank, positions], -1)
        key, value = expand(module, latent, position)
        same_key = torch.einsum("abtr,hnr->ahtn", latent, projections.key)
        same_value = torch.einsum("abtr,hvr->ahtv", latent, projections.value)
        same_key = torch.cat([same_key, position.expand(-1, same_key.shape[1], -1, -1)], -1)
        return _is_close(key, same_key) and _is_close(value, same_value)


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    gap, size = (float(x.float().norm()) for x in (a - b, b))
    return gap <= _CLOSE * size
