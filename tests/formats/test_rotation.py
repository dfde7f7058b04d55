"""Tests of the rotation, which multiplies blocks by a Hadamard matrix and is its own inverse."""

import pytest
import torch

from hf_fp8kv.formats.rotation import compute_rotation_block, rotate


def make_hadamard(size: int) -> torch.Tensor:
    """Return the Hadamard matrix of Sylvester's construction, `[size, size]`, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@pytest.mark.parametrize(
    ("dim", "block"), [(1, 1), (2, 2), (24, 8), (64, 64), (80, 16), (96, 32), (192, 64), (256, 256)]
)
def test_rotation_multiplies_blocks_by_a_hadamard_matrix(dim, block):
    assert compute_rotation_block(dim) == block
    vectors = torch.randn(3, 5, dim)
    expected = vectors.double().unflatten(-1, (-1, block)) @ make_hadamard(block)
    # Each of the log2(block) sums is rounded once, relative to the norm of the vector.
    bound = 2.0**-23 * vectors.double().norm(dim=-1).max()
    assert (rotate(vectors).double() - expected.flatten(-2)).abs().max() <= bound
    assert (rotate(rotate(vectors)).double() - vectors).abs().max() <= 2 * bound


def test_sixteen_bit_values_are_widened_first():
    vectors = torch.randn(2, 64).bfloat16()
    assert torch.equal(rotate(vectors), rotate(vectors.float()))
