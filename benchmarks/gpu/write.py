"""Measure writes: one new token for each sequence, and a whole prompt."""

import functools
from typing import Any

import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import Pages, reference

from .random_data import make_layer_pages
from .record import Record
from .shapes import PAGE_FORMATS, Case, PageFormat, RunSizes

# Maximum number of layers with separate pages. Timed writes alternate between them.
MAX_LAYERS = 32
# Number of tokens of each sequence before a decode step.
STORED_TOKENS = 1000


def measure(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add rows for writes of K and V of one layer, with the strides of a model's tensors."""
    max_layers = 2 if record.stage.is_dry or record.stage.is_compiling else MAX_LAYERS
    num_tokens = sizes.written_tokens
    cases = [
        Case((STORED_TOKENS + 1,) * batch, sizes.heads, label=f"{batch} x 1 token")
        for batch in sizes.write_batches
    ]
    cases.insert(1, Case((num_tokens,), sizes.heads, num_tokens, label=f"1 x {num_tokens}"))
    for case in cases:
        for fmt in PAGE_FORMATS:
            num_layers = max_layers if case.num_new_tokens == 1 else min(max_layers, 4)
            _measure_case(record, sizes, backend, case, fmt, num_layers)


def _measure_case(
    record: Record, sizes: RunSizes, backend: str, case: Case, fmt: PageFormat, num_layers: int
) -> None:
    stage = record.stage
    heads = case.heads
    num_values = len(case.lengths) * case.num_new_tokens * 2 * heads.num_kv_heads * heads.dim

    def measure_row() -> dict[str, Any]:
        layer_pages = make_layer_pages(stage, fmt, case, num_layers, sizes.num_pages)
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=stage.device)
        shape = (len(case.lengths), case.num_new_tokens, heads.num_kv_heads, heads.dim)
        kv_pairs = [
            (stage.randn(*shape).transpose(1, 2), stage.randn(*shape).transpose(1, 2))
            for _ in range(num_layers)
        ]
        steps = [
            functools.partial(ops.write, pages, k, v, lengths, backend)
            for pages, (k, v) in zip(layer_pages, kv_pairs, strict=True)
        ]
        _check_bytes(layer_pages[-1], *kv_pairs[-1], lengths, backend)
        # The values are read, and the codes and scales are written.
        num_bytes = num_values * (2.0 + fmt.compute_bytes_per_value(heads.dim))
        return {**stage.time_steps(steps), "moved": num_bytes, "layers": num_layers}

    record.measure("write", case, fmt.name, measure_row)


def _check_bytes(
    pages: Pages, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, backend: str
) -> None:
    """Write to copies of the pages. Raise RuntimeError if the reference writes different bytes."""
    written, expected = (pages._replace(block=pages.block.clone()) for _ in range(2))
    ops.write(written, key, value, lengths, backend)
    reference.write(expected, key, value, lengths)
    if not torch.equal(written.block, expected.block):
        raise RuntimeError("expected the bytes of the reference, got different bytes")
