"""Rotation of blocks of numbers: the device side of formats/rotation.py.

The same bits as there where products are not fused with sums (`enable_fp_fusion=False`). Blocks
divide a head: what pads a head to a power of two is in blocks of its own.
"""

import triton
import triton.language as tl


@triton.jit
def rotate(x, BLOCK: tl.constexpr):
    """Return the rows of `x`, `[N, W]`, float32, rotated; BLOCK: see `Side`."""
    if BLOCK > 1:
        x = mix(x, BLOCK) * BLOCK**-0.5
    return x


@triton.jit
def lay_out_like(x, given):
    """Return `x`, float32, held by the threads that hold `given`, of the same shape.

    Triton passes on layouts of what is loaded and multiplied, but not through all of `mix`: what
    follows would have one that nothing chose. It does not see that the condition is always true;
    LLVM does.
    """
    magnitude = given.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(magnitude >= 0, x, 0.0)


@triton.jit
def mix(x, BLOCK: tl.constexpr, SWAPPED: tl.constexpr = False):
    """Return the same without the product at the end; SWAPPED: of the columns of `[W, N]`."""
    if BLOCK > 1:
        # Of columns a thread gets more numbers, and waits less for those that others have.
        mixed = x if SWAPPED else tl.trans(x)
        for i in tl.static_range(12):
            if 2**i < BLOCK:
                mixed = _mix_halves(mixed, 2**i)
        x = lay_out_like(mixed if SWAPPED else tl.trans(mixed), x)
    return x


@triton.jit
def _mix_halves(x, HALF: tl.constexpr):
    """Replace numbers of a column that are HALF apart by their sum and their difference."""
    W: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, [W // (2 * HALF), 2, HALF, N]), [0, 2, 3, 1])
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 3, 1, 2]), [W, N])
