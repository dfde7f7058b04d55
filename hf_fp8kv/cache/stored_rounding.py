"""Stored rounding: K and V of a whole text in pages, as a cache would store them, and gradients.

For training: the pages go with the call. The numbers come from the same operations as a cache's,
so every format, scale and backend is what it is there.
"""

from typing import Any

import torch

from .. import ops
from ..errors import ConfigError
from ..utils.tensors import without_grad
from .centers import FirstTokens
from .encoding import Encoding
from .options import CacheOptions
from .paged_tensor import PagedKV, make_handles

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
        self._options, self._encoding = options, Encoding(index, options, FirstTokens())
        self._device: torch.device | None = None  # a model without memory gets some later
        options.layer_scales(index, key.shape[1], key.shape[3], value.shape[3])

    def store(self, key: Tensor, value: Tensor) -> tuple[PagedKV, PagedKV]:
        """Write whole texts to pages of their own, and return the handles that a cache would.

        Args:
            key: `[B, Hkv, T, Dk]`, of any floating dtype.
            value: `[B, Hkv, T, Dv]`.
        """
        encoding = self._encoding
        if key.device != self._device:
            encoding.prepare(key, value)
            self._device = key.device
        batch, _, tokens, _ = key.shape
        columns = -(-tokens // self._options.page_size)
        with torch.no_grad():
            key, value = without_grad(key), without_grad(value)
            pool = self._options.new_pool(encoding.plan)
            pool.allocate(key, value, batch * columns)
            encoding.find_center(key, is_first=True)
            table = torch.arange(batch * columns, dtype=torch.int32, device=key.device)
            lengths = torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
            pages = encoding.record(pool, table.view(batch, columns))
            ops.write(pages, key, value, lengths, encoding.backend)
            span = (0, tokens, 0, False, encoding.backend)
            return make_handles(pages, lengths, None, (key.dtype, value.dtype), *span)

    def read(
        self, stored: tuple[PagedKV, PagedKV], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return K and V as they are read back; gradients pass as if nothing had been rounded.

        Args:
            stored: what `store` returned for them.
            key: `[B, Hkv, T, Dk]`; its dtype stays.
            value: `[B, Hkv, T, Dv]`.
        """
        k, v = (
            x if side.is_auto else straight_through(x, handle.dense())
            for x, handle, side in zip((key, value), stored, self._encoding.plan, strict=True)
        )
        return k, v


def check_stored(options: CacheOptions, why: str) -> None:
    """Raise ConfigError for options with which the bytes depend on how a text is cut into calls.

    `why`: the argument that needs such bytes.
    """
    if options.prefill != "stored":
        raise ConfigError(
            f"{why}: expected prefill='stored', got {options.prefill!r}, with which a "
            "prompt is read unrounded; leave prefill out"
        )
    if options.first_call_centers:
        raise ConfigError(
            f"{why}: expected a plan that carries the centers of K, got one without: "
            "the center would be the mean of the first call, and so depend on where a text is cut "
            "into calls. Make the plan with hf_fp8kv.choose_plan(model), or store K without centers"
        )


def straight_through(states: Tensor, numbers: Tensor) -> Tensor:
    """Return `numbers`, with the gradient of `states`, whose shape and dtype they have."""
    return _StraightThrough.apply(states, numbers)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """Numbers instead of others: the gradient of the ones is that of the others."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, numbers: Tensor) -> Tensor:
        # Adding the difference to `states` would not give exactly these numbers.
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
