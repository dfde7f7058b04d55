"""The Hadamard rotation of a head, an orthonormal transform. This is the specification of its bits.

It spreads each value of a vector over all channels, so that stored values are nearly Gaussian. It
is its own inverse, and leaves dot products of vectors unchanged.

The transform is a butterfly (Fino and Algazi, "Unified Matrix Treatment of the Fast Walsh-Hadamard
Transform", 1976): sums and differences in a fixed order, and one factor at the end. Every backend
therefore computes the same bits and stores the same bytes.
"""

import torch


def compute_rotation_block(dim: int) -> int:
    """Return the largest power of two that divides a head size. 96 is rotated as 3 x 32."""
    return dim & -dim


def compute_rotation_factor(block: int) -> float:
    """Return the factor at the end of a butterfly over `block` channels."""
    return float(block**-0.5)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate `x`, `[..., D]`, in float32, in blocks of `compute_rotation_block(D)` channels."""
    shape = x.shape
    block = compute_rotation_block(x.shape[-1])
    x = x.float()
    for level in range(block.bit_length() - 1):
        a, b = x.reshape(*shape[:-1], -1, 2, 1 << level).unbind(-2)
        x = torch.stack([a + b, a - b], -2)
    return x.reshape(shape) * compute_rotation_factor(block)
