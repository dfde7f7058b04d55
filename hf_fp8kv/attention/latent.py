"""Latent attention (MLA): projections are applied to queries and results, not to stored latents.

An MLA model caches a latent `c` `[R]` and the RoPE part of the key `[P]` for each token. All heads
share both. The model expands all latents in each step: K = [W_K c, RoPE part], V = W_V c. But
q · (W_K c) = (W_K' q) · c, and the sum of p_j W_V c_j is W_V times the sum of p_j c_j (DeepSeek-V2,
arXiv 2405.04434, section 2.1). `ops.attend` therefore reads stored latents as keys and as values,
and W_K and W_V are only applied to queries and results.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..cache.paged_tensor import PagedKV
from ..modeling.identity import ADAPTER_FIELDS
from ..modeling.methods import ModelAttribute, ModelMethod
from ..modeling.model_support import ATTENTION, EXPAND_METHOD
from .deterministic import compute_in_blocks

# Whether an attention module passes stored latents to "fp8_paged" unexpanded.
_READS_STORED = ModelAttribute[bool]("_hf_fp8kv_latent")
# The weight of the projection of an attention module.
_WEIGHT = ModelAttribute["_CachedWeight"]("_hf_fp8kv_absorbed")
# Attributes of a module with the sizes of latents, RoPE parts, keys and values.
_SIZE_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PROJECTION_NAME = "kv_b_proj"
# The module that normalizes latents before they are stored.
_NORM_NAME = "kv_a_layernorm"
# Number of heads that a CPU multiplies at a time in 16 bits.
_HEADS_PER_PRODUCT = 16
# Relative RMS error below which the expansion by a module is treated as equal to the formulas.
_TOLERANCE = 0.02


class Projections:
    """W_K and W_V of an attention module.

    Attributes:
        key: W_K, from latents to keys without the RoPE part, `[H, N, R]`.
        value: W_V, from latents to values, `[H, V, R]`.
    """

    def __init__(self, weight: Tensor, key_dim: int, value_dim: int) -> None:
        """Split `weight`, `[H * (N + V), R]`, into views."""
        head_weights = weight.view(-1, key_dim + value_dim, weight.shape[1])
        self.key, self.value = head_weights.split([key_dim, value_dim], 1)

    def absorb(self, query: Tensor, deterministic: bool = False) -> Tensor:
        """Project queries for keys `[B, H, T, N + P]` to queries for latents `[B, H, T, R + P]`."""
        key_dim = self.key.shape[1]
        batch, num_heads, num_tokens, width = query.shape
        rows = query[..., :key_dim].transpose(0, 1).reshape(num_heads, batch * num_tokens, key_dim)
        if self._writes_to_output(query, deterministic):
            rank = self.key.shape[2]
            latent_query = query.new_empty(num_heads, batch, num_tokens, rank + width - key_dim)
            torch.bmm(rows, self.key, out=latent_query.flatten(1, 2)[..., :rank])
            latent_query[..., rank:] = query[..., key_dim:].transpose(0, 1)
            return latent_query.transpose(0, 1)
        apply = compute_in_blocks if deterministic else _compute_at_once
        absorbed = apply(lambda block: _matmul(block, self.key), rows, 1)
        absorbed = absorbed.reshape(num_heads, batch, num_tokens, -1).transpose(0, 1)
        return torch.cat([absorbed, query[..., key_dim:]], -1)

    def expand(self, attended: Tensor, deterministic: bool = False) -> Tensor:
        """Project sums of latents, `[B, T, H, R]`, to values, `[B, T, H, V]`."""
        batch, num_tokens, num_heads, _ = attended.shape
        if self._writes_to_output(attended, deterministic):
            values = attended.new_empty(batch, num_tokens, num_heads, self.value.shape[1])
            rows = attended.flatten(0, 1).transpose(0, 1)
            torch.bmm(rows, self.value.mT, out=values.flatten(0, 1).transpose(0, 1))
            return values
        columns = attended.permute(2, 3, 0, 1).flatten(2)
        # A CPU is many times slower for a transposed 16-bit matrix.
        apply = compute_in_blocks if deterministic else _compute_at_once
        expanded = apply(lambda block: _matmul(self.value, block.contiguous()), columns, 2)
        return expanded.permute(2, 0, 1).reshape(batch, num_tokens, num_heads, -1)

    def _writes_to_output(self, like: Tensor, deterministic: bool) -> bool:
        """Return whether products are written to their places, which saves copies."""
        is_plain = not deterministic and not torch.compiler.is_compiling()
        return is_plain and like.dtype == self.key.dtype and not _splits_heads(like)

    def is_cheaper(self, num_queries: int, num_keys: int) -> bool:
        """Return whether the absorbed form needs fewer multiplications than the expanded form.

        For `q` queries and `k` keys, the multiplications per head are
        `k * R * (N + V) + q * k * (N + V)` in the expanded form, and
        `q * R * (N + V) + q * k * 2 * R` in the absorbed form. RoPE parts cost the same in both
        forms.
        """
        rank: int = self.key.shape[2]
        expanded_dims: int = self.key.shape[1] + self.value.shape[1]
        absorbed = num_queries * rank * expanded_dims + num_queries * num_keys * 2 * rank
        return absorbed < num_keys * rank * expanded_dims + num_queries * num_keys * expanded_dims


def _compute_at_once(compute: Callable[[Tensor], Tensor], rows: Tensor, _axis: int) -> Tensor:
    return compute(rows)


def _splits_heads(like: Tensor) -> bool:
    """Return whether a few heads are multiplied at a time.

    On a CPU torch copies a 16-bit operand. The copy of a few heads fits in the CPU's cache.
    """
    return like.is_cpu and like.element_size() <= 2 and not torch.compiler.is_compiling()


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the matrices of each head, `[H, m, k]` and `[H, k, n]`."""
    if not _splits_heads(a):
        return torch.bmm(a, b)
    operands = zip(a.split(_HEADS_PER_PRODUCT), b.split(_HEADS_PER_PRODUCT), strict=True)
    return torch.cat([torch.bmm(a_heads, b_heads) for a_heads, b_heads in operands])


def install(module: Any, like: Tensor | None = None) -> None:
    """Make a module pass stored latents to "fp8_paged" unexpanded, if W_K and W_V expand them.

    `like` is a tensor with the dtype and device of the module's latents. It is used if the weight
    of the projection does not determine them. None means the weight of the module's norm.
    """
    if not hasattr(type(module), EXPAND_METHOD) or torch.compiler.is_compiling():
        return
    if _READS_STORED.is_set(module) or EXPAND_METHOD in vars(module):
        return
    weight = _find_plain_weight(getattr(module, _PROJECTION_NAME, None))
    if weight is not None:
        like = weight  # under autocast K may have a different dtype than latents
    elif like is None:
        like = getattr(getattr(module, _NORM_NAME, None), "weight", None)
    if like is None or like.is_meta:
        return
    can_absorb = _expands_by_formulas(module, like)
    if can_absorb is not None:
        _READS_STORED.set(module, can_absorb)
    if can_absorb:
        ModelMethod(module, EXPAND_METHOD, _pass_stored_latents).install()


def install_all(model: torch.nn.Module) -> None:
    """Call `install` for every module of a model."""
    for module in model.modules():
        install(module)


@contextmanager
def temporary_installs(model: torch.nn.Module) -> Iterator[None]:
    """Undo every `install` within the `with` block when the block ends."""
    installed_modules = {module for module in model.modules() if _READS_STORED.is_set(module)}
    try:
        yield
    finally:
        remove_all(model, excluded=installed_modules)


def remove_all(model: torch.nn.Module, excluded: Collection[torch.nn.Module] = ()) -> None:
    """Undo `install` for all modules of a model, except `excluded`."""
    for module in model.modules():
        if module not in excluded and _READS_STORED.remove(module):
            vars(module).pop(EXPAND_METHOD, None)
            _WEIGHT.remove(module)


def reads_stored_latents(module: Any) -> bool:
    """Return whether a module passes stored latents and RoPE parts unexpanded."""
    return bool(_READS_STORED.get(module))


def _pass_stored_latents(
    method: ModelMethod, latent: Tensor, rope_part: Tensor
) -> tuple[Tensor, Tensor]:
    is_stored = isinstance(latent, PagedKV) and isinstance(rope_part, PagedKV)
    if is_stored and method.model.config._attn_implementation.startswith(ATTENTION):
        return latent, rope_part
    return expand(method.model, latent, rope_part)


def expand(module: Any, latent: Tensor, rope_part: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latents by the module's class to K `[B, H, n, N + P]` and V `[B, H, n, V]`."""
    expand_kv = getattr(type(module), EXPAND_METHOD)
    return expand_kv(module, latent, rope_part)  # type: ignore[no-any-return]


def needs_gradient(module: Any, query: Tensor) -> bool:
    """Return whether the queries or the projection of latents need a gradient."""
    if not torch.is_grad_enabled():
        return False
    weights = getattr(module, _PROJECTION_NAME).parameters()
    return query.requires_grad or any(weight.requires_grad for weight in weights)


def find_projections(module: Any, like: Tensor) -> Projections | None:
    """Return the projections for latents with `like`'s dtype and device, or None to expand them."""
    projection = getattr(module, _PROJECTION_NAME)
    weight = _find_plain_weight(projection)
    if weight is None:
        weight = _compute_weight(module, projection, like)
    if weight is None or weight.dtype != like.dtype or weight.device != like.device:
        return None
    return Projections(weight, module.qk_nope_head_dim, module.v_head_dim)


def _find_plain_weight(projection: Any) -> Tensor | None:
    """Return the weight of a module that only multiplies by it, otherwise None."""
    if type(projection) is not torch.nn.Linear or getattr(projection, "bias", None) is not None:
        return None
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    weight: Tensor = projection.weight
    # accelerate implements hooks as a `forward` of the instance.
    if hooks or "forward" in vars(projection) or type(weight) not in (torch.nn.Parameter, Tensor):
        return None
    return weight.detach()


def _compute_weight(module: Any, projection: Any, like: Tensor) -> Tensor | None:
    """Return the weight of a projection, computed by applying it to the identity matrix.

    This covers quantized weights, adapters, and shards of a tensor-parallel weight. The result is
    cached until any of the projection's tensors changes. Compiled code cannot detect changes, and
    computes the weight in each step.

    Returns:
        The weight, or None if the projection does more than multiply, or changes between calls.
    """
    cached_weight = _WEIGHT.get(module)
    rank = module.kv_lora_rank
    if torch.compiler.is_compiling():
        if cached_weight is None or cached_weight.weight is None:
            return None
        with torch.no_grad():
            identity = torch.eye(rank, dtype=like.dtype, device=like.device)
            return projection(identity).T.contiguous()  # type: ignore[no-any-return]
    # Hooks with kwargs may depend on the call, like PEFT's hooks that select adapters by sequence.
    if any(submodule._forward_pre_hooks_with_kwargs for submodule in projection.modules()):
        return None
    tensors = [*projection.parameters(), *projection.buffers()]
    # Packed weights may be neither parameters nor buffers, so the projection itself is included.
    sources = [projection, *tensors]
    state = _describe_state(projection, tensors, like)
    if cached_weight is None or not cached_weight.is_current(state, sources):
        weight = None
        if not projection.training:
            with torch.no_grad():
                # Test inputs: zeros, and values of both signs and different magnitudes.
                inputs = torch.arange(3 * rank, device="cpu").cos().view(3, -1)
                inputs = (inputs * torch.tensor([[0.0], [1.0], [8.0]], device="cpu")).to(like)
                weight = projection(torch.eye(rank, device="cpu").to(like)).T.contiguous()
                if not all(map(_is_close, projection(inputs), inputs @ weight.T)):
                    weight = None
        cached_weight = _CachedWeight(state, sources, weight)
        _WEIGHT.set(module, cached_weight)
    return cached_weight.weight


class _CachedWeight:
    """The weight of a projection, and the state for which it was computed. Copies are empty.

    Attributes:
        weight: The weight, `[H * (N + V), R]`, or None if the projection does more than multiply.
    """

    def __init__(
        self, state: object = None, sources: Iterable[Any] = (), weight: Tensor | None = None
    ) -> None:
        self._state = state
        self._sources = [weakref.ref(source) for source in sources]
        self.weight = weight

    def is_current(self, state: object, sources: list[Any]) -> bool:
        """Return whether the weight was computed from these objects in this state."""
        if state != self._state or len(sources) != len(self._sources):
            return False
        return all(ref() is source for ref, source in zip(self._sources, sources, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return _CachedWeight, ()


def _describe_state(projection: Any, tensors: list[Tensor], like: Tensor) -> tuple[Any, ...]:
    """Return everything that the weight depends on: tensor versions, hooks and PEFT's adapters."""
    state: list[object] = [like.dtype, like.device, projection.training]
    for tensor in tensors:
        state += [tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version]
    for module in projection.modules():
        adapter = [str(getattr(module, name, None)) for name in ADAPTER_FIELDS]
        state += [*module._forward_hooks, *module._forward_pre_hooks, adapter]
    return tuple(state)


def _expands_by_formulas(module: Any, like: Tensor) -> bool | None:
    """Return whether the module's class expands latents by the formulas, tested on two tokens.

    None means that this cannot be determined yet, because the module is in training mode, or
    because dtypes differ (autocast).
    """
    has_sizes = all(isinstance(getattr(module, name, None), int) for name in _SIZE_FIELDS)
    if not has_sizes or not isinstance(getattr(module, _PROJECTION_NAME, None), torch.nn.Module):
        return False
    rank = module.kv_lora_rank
    rope_dim = module.qk_rope_head_dim
    with torch.no_grad():
        projections = find_projections(module, like)
        if projections is None:
            return None
        # The inputs are not random, to leave the user's random generator unchanged.
        inputs = torch.arange(2 * (rank + rope_dim), device=like.device).cos().to(like.dtype)
        latent, rope_part = inputs.view(1, 1, 2, -1).split([rank, rope_dim], -1)
        key, value = expand(module, latent, rope_part)
        nope_part = torch.einsum("abtr,hnr->ahtn", latent, projections.key)
        expected_key = torch.cat([nope_part, rope_part.expand(-1, nope_part.shape[1], -1, -1)], -1)
        expected_value = torch.einsum("abtr,hvr->ahtv", latent, projections.value)
        return _is_close(key, expected_key) and _is_close(value, expected_value)


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    error, norm = (float(states.float().norm()) for states in (actual - expected, expected))
    return error <= _TOLERANCE * norm
