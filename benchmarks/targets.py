"""Compile kernels for a GPU that this machine may lack, for benchmarks and tests."""

from collections.abc import Iterator
from contextlib import contextmanager

from hf_fp8kv.ops.triton import target as targets


@contextmanager
def assuming(target: targets.Target) -> Iterator[None]:
    """Compile kernels for `target` inside the `with` block, on any device."""
    previous, targets.assumed_target = targets.assumed_target, target
    try:
        yield
    finally:
        targets.assumed_target = previous
