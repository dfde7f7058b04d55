"""Test that attention over pages equals attention over the dense K and V from `gather`."""

import importlib

import pytest
import torch

fp8 = importlib.import_module("fp8_paged_attention")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("format", sorted(fp8.FORMATS))
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_attention_over_pages_equals_attention_over_gathered_values(format, num_tokens):
    torch.manual_seed(0)
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32, device=DEVICE)
    pages = fp8.new_pages(table, 4, 2, 32, page_size=16, format=format)
    key, value = (torch.randn(1, 2, 39, 32, device=DEVICE) for _ in "kv")
    lengths = torch.tensor([39], dtype=torch.int32, device=DEVICE)
    fp8.write(pages, key, value, lengths)
    query = torch.randn(1, 6, num_tokens, 32, device=DEVICE)
    spec = fp8.AttentionSpec(scaling=32**-0.5, causal=True)
    actual = fp8.attend(query, pages, lengths, 0, 39, spec)
    k, v = (fp8.gather(pages, lengths, side, 0, 39, torch.float32, False) for side in "kv")
    for dense, original in ((k, key), (v, value)):
        rounding_error = (dense - original).square().mean().sqrt()
        assert rounding_error < 0.1 * original.square().mean().sqrt()
    mask = torch.ones(num_tokens, 39, dtype=torch.bool, device=DEVICE).tril(39 - num_tokens)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, k, v, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 2e-3  # the sums are computed in a different order
