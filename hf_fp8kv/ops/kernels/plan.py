"""Which program of the decode kernel reads which tokens: decided on the device, once per step.

A plan is int32, `[capacity + B + ceil(B * Hkv / 4), 4]`:

    rows 0 ..            (sequence, first token, last token + 1, parts of that sequence); what is
                         left over has the sequence -1
    row  capacity + b    (first row of sequence b, its parts, 0, 0)
    the rest             a counter for each sequence and KV head, 0: how many parts are done

`capacity` is what the GPU holds at once, divided by the KV heads. The parts of all sequences are
about equally long, so that a batch of ragged lengths ends together, and they are as short as fits.
"""

import torch
import triton
import triton.language as tl

from .target import Target, launch, target_of
from .tuning import programs_per_processor

__all__ = ["UNIT", "capacity", "make", "rows"]

# Tokens: parts begin at multiples of it, and none is shorter but a last one. A multiple of every
# tile of the decode kernel.
UNIT = 128


def capacity(batch: int, heads: int, target: Target) -> int:
    """Returns the programs per KV head: one wave, or as many waves as `batch` needs anyway."""
    wave = max(1, target.processors * programs_per_processor(target) // heads)
    return wave * -(-batch // wave)


def rows(batch: int, heads: int, target: Target) -> int:
    """Returns the rows of a plan."""
    return capacity(batch, heads, target) + batch + -(-batch * heads // 4)


def make(plan: torch.Tensor, lengths: torch.Tensor, tokens: int, window: int, start: int) -> None:
    """Overwrites `plan`; arguments as in `ops.make_plan`."""
    batch = lengths.shape[0]
    # The counters are between 1 and 4 rows per 4 KV heads of a sequence: the number of rows says
    # which capacity was meant, whatever the number of KV heads.
    spare = plan.shape[0] - batch
    launch(
        _plan, (batch,), plan, lengths, batch, tokens, window, start, spare,
        UNIT=UNIT, SEQUENCES=triton.next_power_of_2(batch), num_warps=1,
    )  # fmt: skip
