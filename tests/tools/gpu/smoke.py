"""Print versions, and compare a decode call with the reference: `python -m tests.tools.gpu.smoke`.

With `tiny`, every kind of kernel runs on tiny shapes, for compute-sanitizer. With `six`, each of
the six kinds runs with one format.
"""

import argparse
import os
import sys

import torch
import transformers
import triton

from benchmarks.gpu.attention import attend, make_query, make_schedule
from benchmarks.gpu.cached import CacheSteps
from benchmarks.gpu.random_data import compute_output_error, make_layer_pages
from benchmarks.gpu.record import TOLERANCE
from benchmarks.gpu.shapes import BF16, E3M4, E4M3, TINY, Case, Heads, PageFormat
from benchmarks.gpu.stage import Stage
from hf_fp8kv.cache.paged_tensor import get_pages

ON_GPU = torch.cuda.is_available()
HEADS = Heads(8, 2, 64) if ON_GPU else TINY.heads
TINY_CASES = {"ragged": Case((300, 65), HEADS), "extend": Case((200,), HEADS, num_new_tokens=70)}
DECODE_CASE = Case((32768,) if ON_GPU else (130,), HEADS)
LATENT_HEADS = Heads(16, 1, 512, 64) if ON_GPU else TINY.latent_cases[0].heads


def attend_to_pages(stage: Stage, case: Case, fmt: PageFormat) -> float:
    """Return the error of attention over scattered pages. A schedule may split the sequences."""
    [pages] = make_layer_pages(stage, fmt, case, 1, 8)
    query = make_query(stage, case)
    _, schedule, lengths = make_schedule(stage, case, "triton")
    output = attend(query, pages, lengths, case, schedule, "triton")
    return compute_output_error(output, query, pages, case)


def run_cache_steps(stage: Stage, fmt: PageFormat) -> float:
    """Return the error of a growing cache after three steps, which write, schedule and attend."""
    cache_steps = CacheSteps(stage, fmt, Case((130, 130), HEADS), 2, "triton", preallocated=False)
    for _ in range(3):
        for index in range(2):
            output = cache_steps.step(index)
    final_case = Case((132, 132), HEADS)
    return compute_output_error(output, cache_steps.query, get_pages(cache_steps.key), final_case)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", nargs="?", choices=["tiny", "six"])
    size = parser.parse_args().size
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.helpers.interpreter import repair

        repair()
    versions = {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    print(torch.cuda.get_device_name() if ON_GPU else "no GPU", versions, flush=True)
    stage = Stage("cuda" if ON_GPU else "cpu")
    errors = {}
    formats = {"six": (E3M4,), "tiny": (E3M4, E4M3, BF16)}.get(size, ())
    with torch.no_grad():
        for fmt in formats:
            errors[f"cache {fmt.name}"] = run_cache_steps(stage, fmt)
            for name, case in TINY_CASES.items():
                errors[f"{name} {fmt.name}"] = attend_to_pages(stage, case, fmt)
        if formats:
            errors["latent"] = attend_to_pages(stage, Case((300, 65), LATENT_HEADS), E3M4)
        else:
            errors["decode"] = attend_to_pages(stage, DECODE_CASE, E3M4)
        stage.synchronize()
    print({name: f"{error:.1e}" for name, error in errors.items()})
    is_exact = all(error < TOLERANCE for error in errors.values())  # NaN is not
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
