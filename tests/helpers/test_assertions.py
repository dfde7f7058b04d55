"""Tests of the assertions for tensors, whose messages locate the first difference."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.assertions import POOL_AXES, assert_same, assert_same_pool


def make_pool(**fields: torch.Tensor | None) -> SimpleNamespace:
    default_fields = {
        "k_codes": torch.zeros(4, 2, 8, 16, dtype=torch.uint8),
        "v_codes": torch.zeros(4, 2, 16, 8, dtype=torch.uint8),
        "token_scales": torch.ones(4, 2, 8, 2, dtype=torch.bfloat16),
    }
    return SimpleNamespace(**default_fields | fields)


def test_the_message_locates_the_first_difference():
    actual, expected = (torch.zeros(2, 3, 9, 5) for _ in range(2))
    actual[1, 2, 7, 3], actual[1, 2, 8, 0] = 4.5, 1
    location = "sequence 1, head 2, token 7, dim 3"
    message = f"^layer 1: 2 of 270 differ, first at {location}: got 4"
    with pytest.raises(AssertionError, match=message):
        assert_same(actual, expected, "layer 1")


@pytest.mark.parametrize(("field", "axes"), POOL_AXES.items())
def test_a_different_value_of_a_pool_is_located_by_the_names_of_its_axes(field, axes):
    tensor = getattr(make_pool(), field).clone()
    index = {"page": 3, "head": 1, "slot": 6, "dim": 5, "side": 1}
    tensor[tuple(index[axis] for axis in axes)] = 7
    location = ", ".join(f"{axis} {index[axis]}" for axis in axes)
    message = f"^layer 2 {field}: 1 of .* first at {location}: got 7"
    with pytest.raises(AssertionError, match=message):
        assert_same_pool(make_pool(**{field: tensor}), make_pool(), "layer 2")


def test_different_shapes_and_dtypes_are_reported():
    for tensor in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float16)):
        with pytest.raises(AssertionError, match=r"^x: expected torch\.float32 of shape \[2, 3"):
            assert_same(tensor, torch.zeros(2, 3), "x")
    with pytest.raises(AssertionError, match="token_scales: only one of the pools has it"):
        assert_same_pool(make_pool(), make_pool(token_scales=None))
