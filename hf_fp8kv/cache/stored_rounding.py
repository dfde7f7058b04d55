"""Stored rounding: K and V of a whole text as a cache would give them back, with gradients.

For training: no cache keeps anything. The numbers come from the same operations as a cache's, so
every format, scale and backend is what it is there.
"""

from typing import Any

import torch

from .. import ops
from ..errors import ConfigError
from ..formats import LayerPlan
from ..utils.tensors import without_grad
from .options import CacheOptions

Tensor = torch.Tensor


class StoredRounding:
    """How one layer's K and V are rounded: as a cache with these options stores and reads them.

    Dynamic scales are of one token, and static ones of the layer, so that it does not matter with
    which other tokens one is rounded.
    """

    def __init__(self, options: CacheOptions, index: int, key: Tensor, value: Tensor) -> None:
        """Look up what layer `index` stores with, for keys and values of these shapes.

        Raises:
            ScaleError: static scales of other heads.
        """
        self._options, self._plan = options, options.layer_plan(index)
        scales = options.layer_scales(index, key.shape[1], key.shape[3], value.shape[3])
        # A model without memory gets some later.
        self._scales = scales if key.is_meta else _move(scales, key.device)

    def round(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V as they are read back; gradients pass as if nothing had been rounded.

        Args:
            key: `[B, Hkv, T, Dk]`, of any floating dtype, which stays.
            value: `[B, Hkv, T, Dv]`.
        """
        if any(x is not None and x.device != key.device for x in self._scales):
            self._scales = _move(self._scales, key.device)
        options = self._options
        with torch.no_grad():
            states = without_grad(key), without_grad(value)
            rounded = store_and_read(*states, options, self._plan, self._scales)
        k, v = (
            x if side.is_auto else _StraightThrough.apply(x, numbers)  # type: ignore[no-untyped-call]
            for x, numbers, side in zip((key, value), rounded, self._plan, strict=True)
        )
        return k, v


def check_stored(options: CacheOptions) -> None:
    """Raise ConfigError for options with which the bytes depend on how a text is cut into calls."""
    if options.prefill != "stored":
        raise ConfigError(
            f"training='stored': expected prefill='stored', got {options.prefill!r}, with which a "
            "prompt is read unrounded; leave prefill out"
        )
    if options.first_call_centers:
        raise ConfigError(
            "training='stored': expected centers that the scales carry, got center_keys=True "
            "without any: the center would be the mean of the first call, and so depend on where "
            "a text is cut into calls. Make the scales with hf_fp8kv.calibrate(center=True), or "
            "leave center_keys out"
        )


def store_and_read(
    key: Tensor,
    value: Tensor,
    options: CacheOptions,
    plan: LayerPlan,
    scales: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor]:
    """Write whole texts to pages, and return what is read from them.

    Args:
        key: `[B, Hkv, T, Dk]`, without a gradient.
        value: `[B, Hkv, T, Dv]`.
        options: page size and backend.
        plan: how the layer is stored.
        scales: as `CacheOptions.layer_scales` returns them, on the device of the keys.
    """
    batch, _, tokens, _ = key.shape
    device, (k_scale, v_scale, k_center) = key.device, scales
    backend = ops.choose_backend(options.backend, device)
    columns = -(-tokens // options.page_size)
    pool = options.new_pool(plan)
    pool.allocate(key, value, batch * columns)
    if k_center is not None:
        k_center = k_center.expand(batch, -1, -1).contiguous()
    table = torch.arange(batch * columns, dtype=torch.int32, device=device).view(batch, columns)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    pages = pool.record(plan, table, k_scale, v_scale, k_center)
    ops.write(pages, key, value, lengths, backend)
    k, v = (
        ops.gather(pages, lengths, side, 0, tokens, states.dtype, False, backend)
        for side, states in (("k", key), ("v", value))
    )
    return k, v


def _move(scales: Any, device: torch.device) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.to(device) for x in scales)


class _StraightThrough(torch.autograd.Function):
    """Numbers instead of others: the gradient of the ones is that of the others."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, numbers: Tensor) -> Tensor:
        # Adding the difference to `states` would not give exactly these numbers.
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
