"""Compact masks: causal masks that only store the padding.

transformers passes one mask tensor to all layers of a kind, so the mask can carry results that are
computed once per step. A `CompactMask` looks like the complete mask, and operations on it get the
complete mask. "fp8_paged" reads its attributes instead, and applies causality and the window
itself.
"""

from typing import Any

import torch

from ..cache.paged_tensor import StandIn
from ..errors import ConfigError
from ..ops.visibility import mask_bounds, visible

Tensor = torch.Tensor


class CompactMask(StandIn):
    """A causal mask that looks like `[B, 1, T, N]`, bool. The queries are the last filled columns.

    Attributes:
        seen: Which tokens are not padding, `[B, 1, 1, N]`, uint8.
        bounds: First visible position, and last hidden position plus one, `[B, 2]`, int32. Tokens
            that are not stored yet are not hidden.
        filled: Number of columns with tokens, `[B]`, int32.
        start: Position of the first column.
        window: Number of tokens that a query attends to. 0 means all.
        is_checked: Whether the mask was checked to have no padding before tokens, as deterministic
            models require.
    """

    FIELDS = ("seen", "bounds", "filled", "start", "window")
    seen: Tensor
    bounds: Tensor
    filled: Tensor
    start: int
    window: int
    is_checked = False

    def columns(self, start: int, stop: int) -> Tensor:
        """Return the columns of `seen` for positions `start` to `stop - 1`.

        Raises:
            ConfigError: The mask does not cover these positions.
        """
        first, last, width = start - self.start, stop - self.start, self.shape[3]
        if first < 0 or last > width:
            raise ConfigError(
                f"expected a mask that covers the tokens {start} to {stop - 1}, got one of the "
                f"tokens {self.start} to {self.start + width - 1}; pass a mask over the cached and "
                "the new tokens"
            )
        return self.seen if last - first == width else self.seen[..., first:last]

    def complete(self, start: int, stop: int, window: int) -> Tensor:
        """Return the complete mask for positions `start` to `stop - 1`."""
        seen, filled = self.columns(start, stop).bool(), self.filled + (self.start - start)
        return visible(filled, self.shape[2], 0, stop - start, True, window)[:, None] & seen

    def dense(self) -> Tensor:
        """Return the complete mask."""
        return self.complete(self.start, self.start + self.shape[3], self.window)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and options.pop("dtype", None) in (
            None,
            torch.bool,
        ):
            # A model on several devices moves its masks to the device of a layer.
            (tensors, context), mask = args[0].__tensor_flatten__(), args[0]
            copies = {name: func(getattr(mask, name), **options, dtype=None) for name in tensors}
            return cls.__tensor_unflatten__(copies, context, mask.shape, mask.stride())
        return super().__torch_dispatch__(func, types, args, kwargs)


def make_compact(
    present: Tensor, start: int, filled: int | Tensor, window: int, tokens: int
) -> CompactMask:
    """Return a compact mask for `tokens` queries.

    Args:
        present: Which columns are not padding, `[B, N]`, bool. Unfilled columns may have any value.
        start: Position of the first column.
        filled: Number of columns with tokens, or a tensor `[]` on the device.
        window: Number of tokens that a query attends to. 0 means all.
        tokens: Number of queries, T.
    """
    batch, columns = present.shape
    if isinstance(filled, Tensor) or filled < columns:
        column = torch.arange(columns, dtype=torch.int32, device=present.device)
        present = present | (column >= filled)
    if isinstance(filled, Tensor):
        last = filled.int().expand(batch)
    else:
        last = torch.full((batch,), filled, dtype=torch.int32, device=present.device)
    seen = present.to(torch.uint8)[:, None, None]
    attributes = {
        "seen": seen, "bounds": mask_bounds(present, start), "filled": last, "start": start,
        "window": window,
    }  # fmt: skip
    size = (batch, 1, tokens, columns)
    mask: CompactMask = CompactMask.wrap(attributes, size, torch.bool, present.device)
    return mask


torch._dynamo.allow_in_graph(make_compact)  # as `make_handles`
