"""Assertions that tensors are equal. Their messages locate the first difference."""

from typing import Any

import torch

Axes = tuple[str, ...]
# Axes of a pool of pages, and of tensors made from it.
K: Axes = ("page", "head", "slot", "dim")
V: Axes = ("page", "head", "dim", "slot")
SCALES: Axes = ("page", "head", "slot", "side")
DENSE: Axes = ("sequence", "head", "token", "dim")
TOKENS: Axes = ("sequence", "token")
_BY_RANK = {2: TOKENS, 4: DENSE}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(
    got: torch.Tensor, expected: torch.Tensor, what: Any = "", axes: Axes | None = None
) -> None:
    """Assert that two tensors have equal values, as `torch.equal` does. NaN does not equal NaN.

    Args:
        got: Tensor of any shape and dtype.
        expected: Tensor of the same shape and dtype.
        what: Description of the tensors, such as "layer 1, K", which begins the message.
        axes: Names of the axes. None means `TOKENS` or `DENSE`, by the number of axes.
    """
    _assert_none_differs(got, expected, torch.ne, what, axes)


def assert_same_bytes(
    got: torch.Tensor, expected: torch.Tensor, what: Any = "", axes: Axes | None = None
) -> None:
    """Assert that two tensors have the same bits, including NaN and the sign of zero.

    The arguments are as in `assert_same`.
    """
    bits = _BITS[got.element_size()]
    differ = lambda x, y: x.contiguous().view(bits) != y.contiguous().view(bits)  # noqa: E731
    _assert_none_differs(got, expected, differ, what, axes)


def assert_same_pool(got: Any, expected: Any, what: Any = "") -> None:
    """Assert that two `Pages` hold the same bytes: codes of K and V, and dynamic scales."""
    for part, axes in (("k_codes", K), ("v_codes", V), ("token_scales", SCALES)):
        x, y = (getattr(pages, part) for pages in (got, expected))
        name = f"{what} {part}".strip()
        assert (x is None) == (y is None), f"{name}: expected it in both pools or in none"
        if x is not None:
            assert_same_bytes(x, y, name, axes)


def _assert_none_differs(
    got: torch.Tensor, expected: torch.Tensor, differ: Any, what: Any, axes: Axes | None
) -> None:
    start = f"{what}: " if what != "" else ""
    kinds = [f"{x.dtype} of shape {list(x.shape)}" for x in (expected, got)]
    assert kinds[0] == kinds[1], f"{start}expected {kinds[0]}, got {kinds[1]}"
    wrong = differ(got, expected).nonzero()
    if len(wrong) == 0:
        return
    names = _BY_RANK.get(got.ndim, ()) if axes is None else axes
    if len(names) != got.ndim:
        names = tuple(f"axis {i}" for i in range(got.ndim))
    place = tuple(wrong[0].tolist())
    first = ", ".join(f"{name} {at}" for name, at in zip(names, place, strict=True))
    raise AssertionError(
        f"{start}{len(wrong)} of {got.numel()} differ, first at {first or 'the only number'}: "
        f"got {got[place].item()}, expected {expected[place].item()}"
    )
