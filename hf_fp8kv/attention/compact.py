"""Compact masks: causal masks that only store the padding.

transformers passes one mask tensor to all layers of a type, so the mask can carry results that are
computed once per step. A `CompactMask` has the shape and dtype of the complete mask, and operations
that read its values get the complete mask. "fp8_paged" reads the attributes instead, and applies
causality and the window.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import transform_subclass

from ..cache.paged_tensor import LazyTensor
from ..errors import ConfigError
from ..ops.visibility import find_mask_bounds, find_visible

Tensor = torch.Tensor


class CompactMask(LazyTensor):
    """A causal mask that looks like `[B, 1, T, N]`, bool. The queries are the last stored tokens.

    Attributes:
        token_mask: Whether each column holds a token, not padding, `[B, 1, 1, N]`, uint8.
        bounds: First visible position, and last hidden position plus one, `[B, 2]`, int32. Columns
            without a token yet count as visible.
        lengths: Number of columns with tokens or padding, `[B]`, int32.
        start: Position of the first column.
        window: Number of tokens that a query attends to. 0 means all.
        is_checked: Whether `check_padding` found no padding before tokens, as deterministic models
            require.
    """

    FIELDS = ("token_mask", "bounds", "lengths", "start", "window")
    token_mask: Tensor
    bounds: Tensor
    lengths: Tensor
    start: int
    window: int
    is_checked = False

    def get_columns(self, start: int, stop: int) -> Tensor:
        """Return the columns of `token_mask` for positions `start` to `stop - 1`.

        Raises:
            ConfigError: The mask does not cover these positions.
        """
        first_column = start - self.start
        stop_column = stop - self.start
        width = self.shape[3]
        if first_column < 0 or stop_column > width:
            raise ConfigError(
                f"expected a mask that covers the tokens {start} to {stop - 1}, got a mask of the "
                f"tokens {self.start} to {self.start + width - 1}. Pass a mask over the cached and "
                "the new tokens"
            )
        is_whole = stop_column - first_column == width
        return self.token_mask if is_whole else self.token_mask[..., first_column:stop_column]

    def make_complete(self, start: int, stop: int, window: int) -> Tensor:
        """Return the complete mask for positions `start` to `stop - 1`."""
        lengths = self.lengths + self.start - start
        is_visible = find_visible(lengths, self.shape[2], 0, stop - start, True, window)
        return is_visible[:, None] & self.get_columns(start, stop).bool()

    def dense(self) -> Tensor:
        """Return the complete mask."""
        return self.make_complete(self.start, self.start + self.shape[3], self.window)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        copy_options = dict(kwargs or {})
        is_copy = func is torch.ops.aten._to_copy.default
        if is_copy and copy_options.pop("dtype", None) in (None, torch.bool):
            # A model on several devices moves a mask to the device of each layer.
            return transform_subclass(
                args[0], lambda _, tensor: func(tensor, **copy_options, dtype=None)
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def make_compact(
    is_token: Tensor, start: int, length: int | Tensor, window: int, num_queries: int
) -> CompactMask:
    """Return a compact mask for `num_queries` queries.

    Args:
        is_token: Whether each column is not padding, `[B, N]`, bool. Ignored from `length` on.
        start: Position of the first column.
        length: Number of columns with tokens or padding, or a tensor `[]` on the device.
        window: Number of tokens that a query attends to. 0 means all.
        num_queries: Number of queries, T.
    """
    batch, num_columns = is_token.shape
    if isinstance(length, Tensor) or length < num_columns:
        column = torch.arange(num_columns, dtype=torch.int32, device=is_token.device)
        is_token = is_token | (column >= length)
    if isinstance(length, Tensor):
        lengths = length.int().expand(batch)
    else:
        lengths = torch.full((batch,), length, dtype=torch.int32, device=is_token.device)
    # Kernels read rows, and a mask may be column-major.
    token_mask = is_token.to(torch.uint8, memory_format=torch.contiguous_format)
    attributes = {
        "token_mask": token_mask[:, None, None],
        "bounds": find_mask_bounds(is_token, start),
        "lengths": lengths,
        "start": start,
        "window": window,
    }
    return CompactMask.wrap(
        attributes, (batch, 1, num_queries, num_columns), torch.bool, is_token.device
    )


torch._dynamo.allow_in_graph(make_compact)  # Dynamo cannot trace it, as with `make_handles`
