"""Rotation of blocks of channels: the device side of formats/rotation.py.

Kernels give the same bits as formats/rotation.py if products are not fused with sums
(`enable_fp_fusion=False`). Blocks divide a head, so the padding of a head to a power of two is in
separate blocks.
"""

import triton
import triton.language as tl

# Maximum number of levels of a butterfly, for blocks of up to 4096 channels.
MAX_LEVELS = tl.constexpr(12)


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
    operations would get an arbitrary layout. The condition is always true, so LLVM removes it, but
    Triton does not.
    """
    magnitude = reference.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(magnitude >= 0, x, 0.0)


@triton.jit
def mix_channels(x, BLOCK: tl.constexpr, CHANNELS_FIRST: tl.constexpr = False):
    """Rotate rows `[N, W]`, or columns `[W, N]` if CHANNELS_FIRST, without the final factor."""
    if BLOCK > 1:
        # With columns, a thread holds more values and exchanges fewer with other threads.
        columns = x if CHANNELS_FIRST else tl.trans(x)
        for level in tl.static_range(MAX_LEVELS):
            if 2**level < BLOCK:
                columns = _mix_halves(columns, 2**level)
        x = lay_out_like(columns if CHANNELS_FIRST else tl.trans(columns), x)
    return x


@triton.jit
def _mix_halves(x, HALF: tl.constexpr):
    """Replace values of a column that are HALF apart by their sum and difference."""
    W: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, [W // (2 * HALF), 2, HALF, N]), [0, 2, 3, 1])
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 3, 1, 2]), [W, N])
