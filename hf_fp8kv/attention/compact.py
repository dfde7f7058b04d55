"""Compact masks: a causal mask as the padding that it hides, in the place of the complete mask.

transformers hands one tensor to all layers of a kind, so what is computed once per step travels on
that. A `CompactMask` looks like the complete mask, and code that uses it as a tensor gets that.
"fp8_paged" reads the attributes instead, and applies causality and the window itself.
"""

from typing import Any

import torch

from ..cache.paged_tensor import StandIn
from ..errors import ConfigError
from ..ops.visibility import mask_bounds, visible

Tensor = torch.Tensor


class CompactMask(StandIn):
    """A causal mask that looks like `[B, 1, T, N]`, bool; the queries are the last filled columns.

    Attributes:
        seen: `[B, 1, 1, N]`, uint8, 0 is padding.
        bounds: `[B, 2]`, int32, the position of the first visible token, and one past that of the
            last hidden one. (Tokens that are not stored yet are not hidden.)
        filled: `[B]`, int32, columns that hold tokens.
        start: position of the first column.
        window: tokens that a query sees. 0 means all.
        is_checked: whether no padding comes before a token, as deterministic models need it.
    """

    FIELDS = ("seen", "bounds", "filled", "start", "window")
    seen: Tensor
    bounds: Tensor
    filled: Tensor
    start: int
    window: int
    is_checked = False

    def columns(self, start: int, stop: int) -> Tensor:
        """Return `seen` of the tokens at positions `start` to `stop - 1`.

        Raises:
            ConfigError: The mask was made for other tokens.
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
        """Return the complete mask of the tokens at positions `start` to `stop - 1`."""
        seen, filled = self.columns(start, stop).bool(), self.filled + (self.start - start)
        return visible(filled, self.shape[2], 0, stop - start, True, window)[:, None] & seen

    def dense(self) -> Tensor:
        """Return the complete mask."""
        return self.complete(self.start, self.start + self.shape[3], self.window)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        how = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and how.pop("dtype", None) in (None, torch.bool):
            # Models on several devices send their masks after the states.
            (tensors, context), mask = args[0].__tensor_flatten__(), args[0]
            moved = {name: func(getattr(mask, name), **how, dtype=None) for name in tensors}
            return cls.__tensor_unflatten__(moved, context, mask.shape, mask.stride())
        return super().__torch_dispatch__(func, types, args, kwargs)


def make_compact(
    present: Tensor, start: int, filled: int | Tensor, window: int, tokens: int
) -> CompactMask:
    """Return a compact mask for `tokens` queries.

    Args:
        present: `[B, N]`, bool, False is padding; any value for columns that are not filled.
        start: as of the mask.
        filled: columns that hold tokens; a tensor `[]` on the device.
        window: as of the mask.
        tokens: T.
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
