"""How the keys and values of one layer are stored: its plan, static scales and center."""

import torch

from .. import ops
from ..formats import AUTO, SidePlan
from ..modeling.tensor_parallel import check_split
from ..ops import Pages, StoredSide
from ..paging.blocks import zeros
from ..paging.page_pool import PagePool
from .centers import FirstTokens
from .options import CacheOptions
from .rope_rotation import RopeRotation

# Plan of values without channels: some layers with latents have no positional part.
_NO_CHANNELS = SidePlan(AUTO)


class Encoding:
    """Plan, static scales and center of one layer, and the backend that applies them.

    Attributes:
        index: Index of the layer in the model, and in scales.
        plan: Storage plan of the layer.
        k_scale: Static scale of K, `[Hkv, Dk]`, float32, or None.
        v_scale: Static scale of V, `[Hkv, Dv]`, float32, or None.
        k_center: Center of K, `[B, Hkv, Dk]`, float32, or None.
        whole_heads: Number of KV heads of the whole model, which processes may share, or None.
        rope: Rotation of K by RoPE, or None.
        first_tokens: Padding of the cache's sequences.
        device: Device on which the layer computes.
    """

    device: torch.device
    backend: str

    def __init__(
        self,
        index: int,
        options: CacheOptions,
        first_tokens: FirstTokens,
        whole_heads: int | None = None,
        rope: RopeRotation | None = None,
    ) -> None:
        self.index, self.options, self.first_tokens = index, options, first_tokens
        self.whole_heads, self.rope = whole_heads, rope
        self.plan = options.layer_plan(index)
        self.clear()

    def clear(self) -> None:
        """Drop the center and the scales, which `prepare` looks up again."""
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None
        self.k_center: torch.Tensor | None = None
        self._given_center: torch.Tensor | None = None
        self._is_fixed = False

    def prepare(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Look up the static scales when the shapes are known.

        Raises:
            ScaleError: The scales have other heads or head sizes.
            ConfigError: The split of the model does not match `tensor_parallel`.
        """
        heads, k_dim, v_dim = key.shape[1], key.shape[3], value.shape[3]
        check_split(self.index, heads, self.whole_heads, self.options.tensor_parallel.size)
        scales = self.options.layer_scales(self.index, heads, k_dim, v_dim)
        k, v, center = (None if t is None else t.to(key.device) for t in scales)
        self.k_scale, self.v_scale, self._given_center = k, v, center
        self.backend = ops.choose_backend(self.options.backend, key.device)
        self.device = key.device

    def fix_center(self, batch: int, heads: int, dim: int) -> None:
        """Allocate the center, if the layer has one, at a constant address."""
        self._is_fixed = True
        if self._given_center is not None or self.plan.k.centered:
            self.k_center = zeros((batch, heads, dim), torch.float32, self.device)

    def find_center(self, key: torch.Tensor, *, is_first: bool) -> None:
        """Set the center in the first call, or complete it for sequences that only had padding."""
        if not is_first:
            if self.k_center is not None and self.first_tokens.observed is not None:
                self.set_center(self.first_tokens.complete(self.k_center, key, self.rope))
        elif self._given_center is not None:
            self.set_center(self._given_center.expand(key.shape[0], -1, -1).contiguous())
        elif self.plan.k.centered:
            self.set_center(self.first_tokens.find_center(key, self.rope))

    def set_center(self, center: torch.Tensor) -> None:
        """Set the center to subtract from K, `[B, Hkv, Dk]`, float32."""
        if self._is_fixed and self.k_center is not None:
            self.k_center.copy_(center)
        else:
            self.k_center = center

    def select(self, sequences: torch.Tensor) -> None:
        """Select the centers of sequences `[B']`, in place if the batch size is unchanged."""
        if self.k_center is not None:
            selected = self.k_center[sequences.to(self.k_center.device)]
            if self._is_fixed and len(selected) != len(self.k_center):
                self.k_center = zeros(tuple(selected.shape), torch.float32, selected.device)
            self.set_center(selected)

    def record(self, pool: PagePool, table: torch.Tensor) -> Pages:
        """Return the `Pages` of a pool, with block table `table`.

        It is the same object until one of its tensors is replaced.
        """
        blocks, plan, is_compiling = pool.blocks, self.plan, torch.compiler.is_compiling()
        if not is_compiling and blocks.cached_pages is not None:
            cached_plan, cached = blocks.cached_pages
            if (
                plan is cached_plan
                and table is cached.table
                and cached.k.static_scale is self.k_scale
                and cached.k.center is self.k_center
                and cached.v.static_scale is self.v_scale
            ):
                return cached
        v_plan = plan.v if pool.v_dim else _NO_CHANNELS
        pages = Pages(
            StoredSide(self.k_scale, self.k_center, plan.k.format, pool.k_dim, plan.k.rotated),
            StoredSide(self.v_scale, None, v_plan.format, pool.v_dim, v_plan.rotated),
            blocks.tensors[0], table, blocks.offsets, pool.heads, pool.page_size, pool.key_dtype,
            pool.value_dtype, pool.has_scales,
        )  # fmt: skip
        if not is_compiling:
            blocks.cached_pages = plan, pages
        return pages

    def tensors(self) -> list[torch.Tensor]:
        """Return the static scales and the center."""
        tensors = (self.k_scale, self.v_scale, self.k_center)
        return [tensor for tensor in tensors if tensor is not None]
