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
    actual: torch.Tensor, expected: torch.Tensor, label: Any = "", axes: Axes | None = None
) -> None:
    """Assert that two tensors have equal values, as `torch.equal` does. NaN does not equal NaN.

    Args:
        actual: Tensor of any shape and dtype.
        expected: Tensor of the same shape and dtype.
        label: Description of the tensors, such as "layer 1, K", which begins the message.
        axes: Names of the axes. None means `TOKENS` or `DENSE`, by the number of axes.
    """
    _assert_none_differs(actual, expected, torch.ne, label, axes)


def assert_same_bytes(
    actual: torch.Tensor, expected: torch.Tensor, label: Any = "", axes: Axes | None = None
) -> None:
    """Assert that two tensors have the same bits, including NaN and the sign of zero.

    The arguments are as in `assert_same`.
    """
    bits = _BITS[actual.element_size()]
    find_differences = lambda x, y: x.contiguous().view(bits) != y.contiguous().view(bits)  # noqa: E731
    _assert_none_differs(actual, expected, find_differences, label, axes)


def assert_same_pool(actual: Any, expected: Any, label: Any = "") -> None:
    """Assert that two `Pages` hold the same bytes: codes of K and V, and dynamic scales."""
    for part, axes in (("k_codes", K), ("v_codes", V), ("token_scales", SCALES)):
        x, y = (getattr(pages, part) for pages in (actual, expected))
        name = f"{label} {part}".strip()
        assert (x is None) == (y is None), f"{name}: expected it in both pools or in none"
        if x is not None:
            assert_same_bytes(x, y, name, axes)


def _assert_none_differs(
    actual: torch.Tensor,
    expected: torch.Tensor,
    find_differences: Any,
    label: Any,
    axes: Axes | None,
) -> None:
    prefix = f"{label}: " if label != "" else ""
    types = [f"{x.dtype} of shape {list(x.shape)}" for x in (expected, actual)]
    assert types[0] == types[1], f"{prefix}expected {types[0]}, got {types[1]}"
    differences = find_differences(actual, expected).nonzero()
    if len(differences) == 0:
        return
    names = _BY_RANK.get(actual.ndim, ()) if axes is None else axes
    if len(names) != actual.ndim:
        names = tuple(f"axis {i}" for i in range(actual.ndim))
    index = tuple(differences[0].tolist())
    location = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))
    raise AssertionError(
        f"{prefix}{len(differences)} of {actual.numel()} differ, "
        f"first at {location or 'the only value'}: "
        f"got {actual[index].item()}, expected {expected[index].item()}"
    )
