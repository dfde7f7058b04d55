"""Measure writes: one new token for each sequence, and a whole prompt."""

import functools
from typing import Any

import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import Pages, reference

from .pools import pages_for
from .record import Record
from .shapes import KINDS, Case, Kind, Sizes

# Number of layers with separate pages that writes rotate over.
LAYERS = 32
STORED = 1000


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for writes of K and V of one layer, with the strides of a model."""
    layers = 2 if record.stage.dry or record.stage.compiling else LAYERS
    new = sizes.prefill
    cases = [
        Case((STORED + 1,) * batch, sizes.heads, label=f"{batch} x 1 token")
        for batch in sizes.writes
    ]
    cases.insert(1, Case((new,), sizes.heads, tokens=new, label=f"1 x {new}"))
    for case in cases:
        for kind in KINDS:
            count = layers if case.tokens == 1 else min(layers, 4)
            _measure_case(record, sizes, backend, case, kind, count)


def _measure_case(
    record: Record, sizes: Sizes, backend: str, case: Case, kind: Kind, layers: int
) -> None:
    stage, heads = record.stage, case.heads
    new = len(case.lengths) * case.tokens * 2 * heads.kv * heads.dim

    def work() -> dict[str, Any]:
        pools = pages_for(stage, kind, case, layers, sizes.pages)
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=stage.device)
        shape = (len(case.lengths), case.tokens, heads.kv, heads.dim)
        states = [stage.randn(*shape).transpose(1, 2) for _ in range(2 * layers)]
        pairs = list(zip(states[::2], states[1::2], strict=True))
        steps = [
            functools.partial(ops.write, pages, k, v, lengths, backend)
            for pages, (k, v) in zip(pools, pairs, strict=True)
        ]
        _check(pools[-1], *pairs[-1], lengths, backend)
        # The values are read, and the codes and scales are written.
        size = new * (2.0 + kind.bytes_per_value(heads.dim))
        return {**stage.time(steps), "moved": size, "layers": layers}

    record.measure("write", case, kind.name, work)


def _check(
    pages: Pages, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, backend: str
) -> None:
    """Raise RuntimeError unless all stored bytes equal the reference's bytes."""
    written, expected = (pages._replace(block=pages.block.clone()) for _ in range(2))
    ops.write(written, key, value, lengths, backend)
    reference.write(expected, key, value, lengths)
    for name, stored, reference_bytes in (
        ("k", written.k_codes, expected.k_codes),
        ("v", written.v_codes, expected.v_codes),
        ("token_scales", written.token_scales, expected.token_scales),
    ):
        if stored is not None and not torch.equal(
            stored.view(torch.uint8), reference_bytes.view(torch.uint8)
        ):
            raise RuntimeError(f"{name}: expected the bytes of the reference")
