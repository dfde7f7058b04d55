"""Assertions that tensors are equal. Their messages locate the first difference."""

from typing import Any

import torch

Axes = tuple[str, ...]
# Names of the axes of a pool of pages, and of tensors that are read from it.
K_AXES: Axes = ("page", "head", "slot", "dim")
V_AXES: Axes = ("page", "head", "dim", "slot")
SCALES_AXES: Axes = ("page", "head", "slot", "side")
POOL_AXES = {"k_codes": K_AXES, "v_codes": V_AXES, "token_scales": SCALES_AXES}
DENSE_AXES: Axes = ("sequence", "head", "token", "dim")
TOKENS_AXES: Axes = ("sequence", "token")
_AXES_BY_RANK = {2: TOKENS_AXES, 4: DENSE_AXES}
_INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(
    actual: torch.Tensor, expected: torch.Tensor, label: Any = "", axes: Axes | None = None
) -> None:
    """Assert that two tensors have equal values, as `torch.equal` does. NaN does not equal NaN.

    Args:
        actual: Tensor of any shape and dtype.
        expected: Tensor of the same shape and dtype.
        label: Description of the tensors, such as "layer 1, K", which begins the message.
        axes: Names of the axes. None means `TOKENS_AXES` or `DENSE_AXES`, by the number of axes.
    """
    _assert_none_differs(actual, expected, torch.ne, label, axes)


def assert_same_bytes(
    actual: torch.Tensor, expected: torch.Tensor, label: Any = "", axes: Axes | None = None
) -> None:
    """Assert that two tensors are bitwise equal, including NaN and the sign of zero.

    The arguments are as in `assert_same`.
    """
    int_dtype = _INT_DTYPES[actual.element_size()]

    def find_differences(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(int_dtype) != y.contiguous().view(int_dtype)

    _assert_none_differs(actual, expected, find_differences, label, axes)


def assert_same_pool(actual: Any, expected: Any, label: Any = "") -> None:
    """Assert that two `Pages` hold the same bytes: codes of K and V, and dynamic scales."""
    for field, axes in POOL_AXES.items():
        x, y = (getattr(pages, field) for pages in (actual, expected))
        field_label = f"{label} {field}".strip()
        assert (x is None) == (y is None), f"{field_label}: only one of the pools has it"
        if x is not None:
            assert_same_bytes(x, y, field_label, axes)


def _assert_none_differs(
    actual: torch.Tensor, expected: torch.Tensor, find_differences: Any, label: Any,
    axes: Axes | None,
) -> None:  # fmt: skip
    prefix = f"{label}: " if label != "" else ""
    expected_type, actual_type = (f"{x.dtype} of shape {list(x.shape)}" for x in (expected, actual))
    assert expected_type == actual_type, f"{prefix}expected {expected_type}, got {actual_type}"
    differences = find_differences(actual, expected).nonzero()
    if len(differences) == 0:
        return
    axes = _AXES_BY_RANK.get(actual.ndim, ()) if axes is None else axes
    if len(axes) != actual.ndim:
        axes = tuple(f"axis {i}" for i in range(actual.ndim))
    index = tuple(differences[0].tolist())
    location = ", ".join(f"{name} {i}" for name, i in zip(axes, index, strict=True))
    raise AssertionError(
        f"{prefix}{len(differences)} of {actual.numel()} differ, "
        f"first at {location or 'the only value'}: "
        f"got {actual[index].item()}, expected {expected[index].item()}"
    )
