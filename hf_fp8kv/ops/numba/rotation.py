"""Rotation of a vector in memory: the bits of formats/rotation.py, so nothing here may be fused."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from .arithmetic import add, mul, splat, sub
from .lanes import FLOAT_VECTOR, I32, LANES, VECTOR, jit, operation, vector_of
from .memory import load, store


def _mix_within(half: int) -> Callable[..., Any]:
    """Return the operation on a vector that adds and subtracts lanes `half` apart."""

    def emit(builder: Any, a: Any) -> Any:
        lanes = vector_of(I32)
        other = [lane ^ half for lane in range(LANES)]
        swapped = builder.shuffle_vector(a, a, ir.Constant(lanes, other))
        sign = [-0x80000000 if lane & half else 0 for lane in range(LANES)]
        signed = builder.xor(builder.bitcast(a, lanes), ir.Constant(lanes, sign))
        return builder.fadd(swapped, builder.bitcast(signed, FLOAT_VECTOR))

    return operation(VECTOR, VECTOR)(emit)


_mix_1, _mix_2, _mix_4, _mix_8 = (_mix_within(half) for half in (1, 2, 4, 8))


@jit
def rotate_line(line: int, dim: int, block: int) -> None:
    """Rotate `dim` float32 numbers at `line`, which is as long as whole vectors, in place."""
    for i in range(0, dim, LANES):
        x = load(line + 4 * i)
        if block > 1:
            x = _mix_1(x)
        if block > 2:
            x = _mix_2(x)
        if block > 4:
            x = _mix_4(x)
        if block > 8:
            x = _mix_8(x)
        store(line + 4 * i, x)
    half = LANES
    while half < block:
        for first in range(0, dim, 2 * half):
            for i in range(first, first + half, LANES):
                a, b = load(line + 4 * i), load(line + 4 * (i + half))
                store(line + 4 * i, add(a, b))
                store(line + 4 * (i + half), sub(a, b))
        half *= 2
    factor = splat(np.float32(1 / math.sqrt(block)))
    for i in range(0, dim, LANES):
        store(line + 4 * i, mul(load(line + 4 * i), factor))
