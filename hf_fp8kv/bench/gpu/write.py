"""Write section: one new token per sequence, and a whole prompt."""

import functools
from typing import Any

import torch

from ... import ops
from ...ops import Pages, StoredSide, reference
from .pools import pages_for
from .record import Record
from .shapes import KINDS, Case, Kind, Sizes

# Layers, each with pages of its own, that writes go to in turns.
LAYERS = 32
STORED = 1000


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for K and V of one layer, as the model hands them over."""
    layers = 2 if record.stage.dry else LAYERS
    for kind in KINDS:
        for batch in sizes.writes:
            case = Case((STORED + 1,) * batch, sizes.heads, label=f"{batch} x 1 token")
            _measure_case(record, sizes, backend, case, kind, layers)
        case = Case(
            (sizes.prefill,), sizes.heads, tokens=sizes.prefill, label=f"1 x {sizes.prefill}"
        )
        _measure_case(record, sizes, backend, case, kind, min(layers, 4))


def _measure_case(
    record: Record, sizes: Sizes, backend: str, case: Case, kind: Kind, layers: int
) -> None:
    stage, heads = record.stage, case.heads
    new = len(case.lengths) * case.tokens * 2 * heads.kv * heads.dim

    def work() -> dict[str, Any]:
        pools = pages_for(stage, kind, case, layers, sizes.pages)
        before = torch.tensor(case.lengths, dtype=torch.int32, device=stage.device) - case.tokens
        shape = (len(case.lengths), case.tokens, heads.kv, heads.dim)
        pairs = [
            tuple(torch.randn(shape, dtype=torch.bfloat16, device=stage.device) for _ in range(2))
            for _ in range(layers)
        ]
        steps = [
            functools.partial(
                ops.write, pages, k.transpose(1, 2), v.transpose(1, 2), before, backend
            )
            for pages, (k, v) in zip(pools, pairs, strict=True)
        ]
        k, v = pairs[-1]
        _check(pools[-1], k.transpose(1, 2), v.transpose(1, 2), before, backend)
        # Read: the numbers; written: what is stored.
        moved = new * (2.0 + kind.bytes_per_number(heads.dim))
        return {"timed": stage.time(steps), "moved": moved, "layers": layers}

    record.measure("write", str(case), kind.name, work)


def _check(
    pages: Pages, key: torch.Tensor, value: torch.Tensor, before: torch.Tensor, backend: str
) -> None:
    """Raise RuntimeError unless every stored byte is the one that the reference stores."""
    found, expected = _copy(pages), _copy(pages)
    ops.write(found, key, value, before, backend)
    reference.write(expected, key, value, before)
    for side, one, other in (("k", found.k, expected.k), ("v", found.v, expected.v)):
        for name, ours, theirs in (
            ("codes", one.codes, other.codes),
            ("token_scales", one.token_scales, other.token_scales),
        ):
            if ours is None or theirs is None:
                continue
            integers = torch.int16 if ours.dtype == torch.bfloat16 else ours.dtype
            differ = int((ours.view(integers) != theirs.view(integers)).sum())
            if differ:
                raise RuntimeError(
                    f"expected the reference's bytes, got {differ} others in {side}.{name}"
                )


def _copy(pages: Pages) -> Pages:
    return pages._replace(k=_copy_side(pages.k), v=_copy_side(pages.v))


def _copy_side(side: StoredSide) -> StoredSide:
    scales = side.token_scales
    return side._replace(
        codes=side.codes.clone(), token_scales=None if scales is None else scales.clone()
    )
