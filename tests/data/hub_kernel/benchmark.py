"""Time the attention of a decode step over 8-bit pages, and torch's attention over dense bf16."""

import importlib
from functools import partial

import torch
from triton.testing import do_bench

fp8 = importlib.import_module("fp8_paged_attention")


def measure_step(length: int) -> tuple[float, float]:
    """Return the milliseconds of a step over `length` tokens, with pages and with dense bf16."""
    table = torch.arange(length // 64, dtype=torch.int32, device="cuda")[None]
    pages = fp8.new_pages(table, length // 64, 8, 128)
    key, value = (torch.randn(1, 8, length, 128, device="cuda").bfloat16() for _ in "kv")
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    fp8.write(pages, key, value, lengths)
    query = torch.randn(1, 32, 1, 128, device="cuda").bfloat16()
    spec = fp8.AttentionSpec(scaling=128**-0.5, causal=True)
    attend_to_pages = partial(fp8.attend, query, pages, lengths, 0, length, spec)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    attend_to_dense = partial(sdpa, query, key, value, enable_gqa=True)
    return do_bench(attend_to_pages), do_bench(attend_to_dense)


if __name__ == "__main__":
    for length in (4096, 32768, 131072):
        paged_ms, dense_ms = measure_step(length)
        print(f"{length} tokens: pages {paged_ms:.3f} ms, torch in bf16 {dense_ms:.3f} ms")
