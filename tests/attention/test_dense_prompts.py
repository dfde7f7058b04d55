"""Tests that prompts use cuDNN on an H100 where it is faster, and give the same values."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.layers import AttentionLayer, Heads, make_config
from hf_fp8kv import FP8PagedCache
from hf_fp8kv.attention import fp8_paged
from hf_fp8kv.attention.compact import make_compact
from hf_fp8kv.modeling.model_support import DETERMINISTIC
from hf_fp8kv.ops import dense_prompts

BATCH = 2
HEADS = Heads(4, 2, 32)
NUM_TOKENS = 40


class StoredPrompt:
    """A prompt whose attention reads the stored values, and a layer that computes it."""

    def __init__(
        self, num_tokens: int = NUM_TOKENS, *, query_dtype: torch.dtype = torch.bfloat16,
        deterministic: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.cache = FP8PagedCache(
            make_config(HEADS), dtype="fp8_e3m4", prefill="stored", page_size=16, backend="torch",
            **options,
        )  # fmt: skip
        self.layer = AttentionLayer(2).eval()
        if deterministic:
            DETERMINISTIC.set(self.layer, True)
        self.query = torch.randn(
            BATCH, HEADS.num_query_heads, num_tokens, HEADS.dim, dtype=query_dtype
        )
        self.add_tokens(num_tokens)

    def add_tokens(self, num_tokens: int) -> None:
        states = torch.randn(2, BATCH, HEADS.num_kv_heads, num_tokens, HEADS.dim).bfloat16()
        self.key, self.value = self.cache.update(*states, 0)

    def attend(self, mask: Any = None, **keywords: Any) -> torch.Tensor:
        keywords = {"sliding_window": None, **keywords}
        return ALL_ATTENTION_FUNCTIONS["fp8_paged"](
            self.layer, self.query, self.key, self.value, mask, **keywords
        )[0]


@pytest.fixture
def dense_attention(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Simulate an H100, and record the calls of torch's attention over dense copies."""
    attend = mock.Mock(side_effect=dense_prompts.scaled_dot_product_attention)
    monkeypatch.setattr(dense_prompts, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(dense_prompts, "_MIN_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(dense_prompts, "_read_capability", lambda _: (9, 0))
    return attend


@torch.no_grad()
def test_stored_prompts_prefer_cudnn_on_an_h100(
    dense_attention: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention reads a dense copy of the stored values instead of pages if this is faster."""
    prompt = StoredPrompt()
    actual = prompt.attend(scaling=0.5)
    with torch.autocast("cpu", torch.float16):
        assert prompt.attend().dtype == torch.bfloat16
    assert dense_attention.call_count == 2
    assert actual.is_contiguous()
    monkeypatch.setattr(dense_prompts, "_read_capability", lambda _: None)
    expected = prompt.attend(scaling=0.5)
    assert dense_attention.call_count == 2
    # Stored values are rounded to bfloat16, by at most 2 ** -9 each.
    assert (actual - expected).float().norm() <= 2**-8 * expected.float().norm()


IS_TOKEN = torch.ones(BATCH, NUM_TOKENS, dtype=torch.bool)
IS_TOKEN[0, :3] = False
# Options of a stored prompt, and keywords of attention, that cuDNN does not support.
UNSUPPORTED_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "short": ({"num_tokens": NUM_TOKENS - 1}, {}),
    "preallocated": ({"max_cache_len": 50}, {}),
    "deterministic": ({"deterministic": True}, {}),
    "float32": ({"query_dtype": torch.float32}, {}),
    "padding": ({}, {"mask": make_compact(IS_TOKEN, 0, NUM_TOKENS, 0, NUM_TOKENS)}),
    "mask": ({}, {"mask": torch.ones(BATCH, 1, NUM_TOKENS, NUM_TOKENS).tril().bool()}),
    "bias": ({}, {"position_bias": torch.zeros(1, HEADS.num_query_heads, NUM_TOKENS, NUM_TOKENS)}),
    "softcap": ({}, {"softcap": 5.0}),
    "window": ({}, {"sliding_window": 10}),
    "not causal": ({}, {"is_causal": False}),
    "sinks": ({}, {"s_aux": torch.zeros(HEADS.num_query_heads)}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", UNSUPPORTED_CALLS)
def test_unsupported_calls_read_pages(name: str, dense_attention: mock.Mock) -> None:
    options, keywords = UNSUPPORTED_CALLS[name]
    StoredPrompt(**options).attend(**keywords)
    assert not dense_attention.called


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "max_value"),
    [
        ("_MAX_HEAD_DIM", HEADS.dim // 2),
        ("_MAX_DENSE_BYTES", BATCH * HEADS.num_kv_heads * NUM_TOKENS * 2 * HEADS.dim),
    ],
)
def test_large_prompts_read_pages(
    name: str, max_value: int, dense_attention: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt needs twice the largest number of bytes."""
    monkeypatch.setattr(dense_prompts, name, max_value)
    StoredPrompt().attend()
    assert not dense_attention.called


@torch.no_grad()
def test_a_second_chunk_reads_pages(dense_attention: mock.Mock) -> None:
    prompt = StoredPrompt()
    prompt.add_tokens(NUM_TOKENS)
    prompt.attend()
    assert not dense_attention.called


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0), None])
def test_prompts_prefer_cudnn_on_an_h100(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = mock.Mock(side_effect=fp8_paged.sdpa_kernel)
    monkeypatch.setattr(fp8_paged, "sdpa_kernel", kernel)
    monkeypatch.setattr(dense_prompts, "_read_capability", lambda _: capability)

    def attend(num_tokens: int, mask: Any = None, **keywords: Any) -> None:
        query = torch.randn(1, HEADS.num_query_heads, num_tokens, HEADS.dim)
        key = query[:, : HEADS.num_kv_heads]
        ALL_ATTENTION_FUNCTIONS["fp8_paged"](
            AttentionLayer(2).eval(), query, key, key, mask, **keywords
        )

    with torch.no_grad():
        attend(512)
        preferred_backends = [
            SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
        ]  # fmt: skip
        expected_call = mock.call(preferred_backends, set_priority=True)
        assert kernel.call_args_list == ([expected_call] if capability == (9, 0) else [])
        kernel.reset_mock()
        attend(511)
        attend(512, torch.ones(1, 1, 512, 512, dtype=torch.bool))
        attend(512, is_causal=False)
        torch.use_deterministic_algorithms(True)
        attend(512)
        torch.use_deterministic_algorithms(False)
        with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
            attend(512)
    with torch.enable_grad():
        attend(512)
    assert not kernel.called
