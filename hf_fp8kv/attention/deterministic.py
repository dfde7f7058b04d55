"""Requirements of deterministic attention, and row operations in blocks of a fixed size.

Matrix libraries use different code, with a different order of sums, for different numbers of rows.
`reproducible/modules.py` makes a whole model deterministic.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ConfigError

# Minimum number of slots per page.
MIN_PAGE_SIZE = 16
# Number of rows in a block. More rows make a single token slower, and fewer make a prompt slower.
BLOCK_ROWS = 16


def check_page_size(page_size: int) -> None:
    """Raise ConfigError if a page is smaller than an AVX-512 vector.

    Smaller pages change the order of sums.
    """
    if page_size < MIN_PAGE_SIZE:
        raise ConfigError(
            f"deterministic: expected pages of {MIN_PAGE_SIZE} tokens or more, got page_size="
            f"{page_size}. Leave page_size out for the default"
        )


def check_padding(is_token: Tensor) -> None:
    """Raise ConfigError if a sequence of a deterministic model has padding before its last token.

    Padding would move tokens to different slots, which changes the order of sums. `is_token` is
    `[B, N]`, 0 or False for padding.
    """
    if (is_token.int().diff() > 0).any():
        raise ConfigError(
            "deterministic: expected sequences that begin at the first position, got padding "
            "before or inside them. Use hf_fp8kv.serving and generate_batch, which need no "
            "padding, or sequences of equal length"
        )


def compute_in_blocks(compute: Callable[[Tensor], Tensor], rows: Tensor, axis: int = 0) -> Tensor:
    """Apply `compute` to blocks of `BLOCK_ROWS` rows. The last block is padded with zeros.

    Rows are copied, because strides and the alignment of memory affect the order of sums.
    """
    num_rows = rows.shape[axis]
    padding_shape = list(rows.shape)
    padding_shape[axis] = -num_rows % BLOCK_ROWS
    rows = torch.cat([rows, rows.new_zeros(padding_shape)], axis)
    outputs = torch.cat([compute(block) for block in rows.split(BLOCK_ROWS, axis)], axis)
    return outputs.narrow(axis, 0, num_rows)
