"""Write section: one new token per sequence, and a whole prompt."""

import functools
from typing import Any

import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import Pages, reference

from .pools import map_stored, pages_for
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
        new = sizes.prefill
        case = Case((new,), sizes.heads, tokens=new, label=f"1 x {new}")
        _measure_case(record, sizes, backend, case, kind, min(layers, 4))


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
        # Read: the numbers; written: what is stored.
        moved = new * (2.0 + kind.bytes_per_number(heads.dim))
        return {"timed": stage.time(steps), "moved": moved, "layers": layers}

    record.measure("write", case, kind.name, work)


def _check(
    pages: Pages, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, backend: str
) -> None:
    """Raise RuntimeError unless every stored byte is the one that the reference stores."""
    written, expected = (map_stored(pages, torch.Tensor.clone) for _ in range(2))
    ops.write(written, key, value, lengths, backend)
    reference.write(expected, key, value, lengths)
    for name in ("k", "v", "token_scales"):
        ours, theirs = (getattr(p, name) for p in (written, expected))
        if name != "token_scales":
            ours, theirs = ours.codes, theirs.codes
        if ours is None:
            continue
        integers = torch.int16 if ours.dtype == torch.bfloat16 else ours.dtype
        if differ := int((ours.view(integers) != theirs.view(integers)).sum()):
            raise RuntimeError(f"expected the reference's bytes, got {differ} others in {name}")
