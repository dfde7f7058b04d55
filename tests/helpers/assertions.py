"""Assertions that tensors are equal. Their messages locate a difference."""

from typing import Any

import torch

_INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(actual: torch.Tensor, expected: torch.Tensor, label: Any = "") -> None:
    """Assert that two tensors have equal values, shapes and dtypes. NaN does not equal NaN.

    `label` describes the tensors, such as "layer 1, K", and begins the message.
    """
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, msg=lambda text: f"{label} {text}".strip()
    )


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor, label: Any = "") -> None:
    """Assert that two tensors are bitwise equal, including NaN and the sign of zero."""
    assert actual.dtype == expected.dtype, f"{label}: {actual.dtype} instead of {expected.dtype}"
    int_dtype = _INT_DTYPES[actual.element_size()]
    actual_bits, expected_bits = (
        tensor.contiguous().view(int_dtype) for tensor in (actual, expected)
    )
    assert_same(actual_bits, expected_bits, label)


def assert_same_pool(actual: Any, expected: Any, label: Any = "") -> None:
    """Assert that two `Pages` hold the same bytes: codes of K and V, and dynamic scales."""
    assert actual.regions.keys() == expected.regions.keys(), label
    for name, region in actual.regions.items():
        assert_same_bytes(region, expected.regions[name], f"{label} {name}")
