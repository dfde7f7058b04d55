"""The encoding of one layer's keys and values: storage plan, static scales and center."""

import torch

from .. import ops
from ..formats import AUTO, SidePlan
from ..modeling.tensor_parallel import check_split
from ..ops import Pages, StoredSide
from ..paging.page_pool import PagePool
from .options import CacheOptions

# Plan of values without channels. Some layers with latents have no RoPE part.
_NO_VALUES_PLAN = SidePlan(AUTO)


class Encoding:
    """Plan, static scales and center of one layer, and the backend that applies them.

    Attributes:
        index: Index of the layer in the model and in the scales.
        options: Options of the cache.
        plan: Storage plan of the layer.
        k_scale: Static scale of K, `[Hkv, Dk]`, float32, or None.
        v_scale: Static scale of V, `[Hkv, Dv]`, float32, or None.
        k_center: Center of K, `[Hkv, Dk]`, float32, or None.
        num_model_heads: Number of KV heads of the whole model if they are split among processes,
            otherwise None.
        device: Device on which the layer computes. Set by `prepare`.
        backend: Name of the backend on this device. Set by `prepare`.
    """

    device: torch.device
    backend: str

    def __init__(
        self, index: int, options: CacheOptions, num_model_heads: int | None = None
    ) -> None:
        self.index = index
        self.options = options
        self.num_model_heads = num_model_heads
        self.plan = options.get_layer_plan(index)
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None
        self.k_center: torch.Tensor | None = None

    def prepare(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set the static scales, the center, the backend and the device when shapes are known.

        Raises:
            ScaleError: The scales have a different number of heads or a different head size.
            ConfigError: The split of the model does not match `tensor_parallel`.
        """
        num_heads = key.shape[1]
        check_split(self.index, num_heads, self.num_model_heads, self.options.tensor_parallel.size)
        scales = self.options.get_layer_scales(self.index, num_heads, key.shape[3], value.shape[3])
        self.k_scale, self.v_scale, self.k_center = (
            None if tensor is None else tensor.to(key.device) for tensor in scales
        )
        self.backend = ops.choose_backend(self.options.backend, key.device)
        self.device = key.device

    def make_pages(self, pool: PagePool, table: torch.Tensor) -> Pages:
        """Return the `Pages` of a pool, with block table `table`.

        The result is the same object until one of its tensors is replaced.
        """
        blocks = pool.blocks
        plan = self.plan
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and blocks.cached_plan_and_pages is not None:
            cached_plan, cached_pages = blocks.cached_plan_and_pages
            if (
                plan is cached_plan
                and table is cached_pages.table
                and cached_pages.k.static_scale is self.k_scale
                and cached_pages.k.center is self.k_center
                and cached_pages.v.static_scale is self.v_scale
            ):
                return cached_pages
        v_plan = plan.v if pool.v_dim else _NO_VALUES_PLAN
        pages = Pages(
            StoredSide(self.k_scale, self.k_center, plan.k.format, pool.k_dim, plan.k.rotated),
            StoredSide(self.v_scale, None, v_plan.format, pool.v_dim, v_plan.rotated),
            blocks.tensors[0],
            table,
            blocks.offsets,
            pool.num_heads,
            pool.page_size,
            pool.stored_k_dtype,
            pool.stored_v_dtype,
            pool.has_scales,
        )
        if not is_compiling:
            blocks.cached_plan_and_pages = plan, pages
        return pages

    def list_scales_and_center(self) -> list[torch.Tensor]:
        """Return the static scales and the center."""
        return [
            tensor for tensor in (self.k_scale, self.v_scale, self.k_center) if tensor is not None
        ]
