"""Rotation of blocks of channels: the device side of formats/rotation.py.

It gives the same bits as formats/rotation.py if products are not fused with sums
(`enable_fp_fusion=False`). Blocks divide a head, so the padding of a head to a power of two is in
separate blocks.
"""

import triton
import triton.language as tl


@triton.jit
def rotate(x, BLOCK: tl.constexpr):
    """Rotate the rows of `x`, `[N, W]`, float32, in blocks of BLOCK channels."""
    if BLOCK > 1:
        x = mix_channels(x, BLOCK) * BLOCK**-0.5
    return x


@triton.jit
def lay_out_like(x, reference):
    """Return `x`, float32, in the layout of `reference`, which has the same shape.

    Triton propagates layouts of loads and products, but not through all of `mix_channels`, so later
    operations would get an arbitrary layout. Triton does not detect that the condition is always
    true. LLVM does, and removes it.
    """
    magnitude = reference.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(magnitude >= 0, x, 0.0)


@triton.jit
def mix_channels(x, BLOCK: tl.constexpr, SWAPPED: tl.constexpr = False):
    """Rotate rows, without the final factor. With SWAPPED, rotate the columns of `[W, N]`."""
    if BLOCK > 1:
        # With columns, a thread holds more values and exchanges fewer with other threads.
        columns = x if SWAPPED else tl.trans(x)
        for i in tl.static_range(12):
            if 2**i < BLOCK:
                columns = _mix_halves(columns, 2**i)
        x = lay_out_like(columns if SWAPPED else tl.trans(columns), x)
    return x


@triton.jit
def _mix_halves(x, HALF: tl.constexpr):
    """Replace values of a column that are HALF apart by their sum and difference."""
    W: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, [W // (2 * HALF), 2, HALF, N]), [0, 2, 3, 1])
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 3, 1, 2]), [W, N])
