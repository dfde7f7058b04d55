"""Rotation: an orthonormal Hadamard transform over a head, the specification of its numbers.

It spreads each number of a vector over all of them, so that what is stored is close to Gaussian,
and it is its own inverse. Products of rotated vectors are those of the vectors.

The transform is a butterfly (Fino and Algazi, "Unified Matrix Treatment of the Fast Walsh-Hadamard
Transform", 1976): sums and differences in a fixed order, and one product at the end. So every
backend gets the same bits, and with them stores the same bytes.
"""

import torch


def rotation_block(dim: int) -> int:
    """Return the largest power of two that divides a head's size: 96 is rotated as 3 x 32."""
    return dim & -dim


def rotation_factor(block: int) -> float:
    """Return what the sums of a butterfly over `block` numbers are multiplied by."""
    return float(block**-0.5)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, `[..., D]`, rotated: float32, in blocks of `rotation_block(D)` numbers."""
    shape, block = x.shape, rotation_block(x.shape[-1])
    x = x.float()
    for level in range(block.bit_length() - 1):
        a, b = x.reshape(*shape[:-1], -1, 2, 1 << level).unbind(-2)
        x = torch.stack([a + b, a - b], -2)
    return x.reshape(shape) * rotation_factor(block)
