"""Tests that vLLM with FP8 pages gives the greedy tokens of `FP8PagedCache(prefill="stored")`."""

import pytest
import torch

from hf_fp8kv import FP8PagedCache, choose_plan
from hf_fp8kv.cache.paged_tensor import get_pages
from hf_fp8kv.vllm.dtypes import DTYPES

from ..helpers.planned import protected_plan_for
from . import conftest
from .conftest import generate, generate_expected, make_cache_options, make_scales

DYNAMIC_OPTIONS = {
    "hf_fp8kv": {},
    "hf_fp8kv_e2m5": {"dtype": "fp8_e2m5"},
    "hf_fp8kv_int8": {"dtype": "int8"},
}


def test_different_scales_change_the_tokens(load_model, prompts):
    """Otherwise the tests of static scales could pass with any scales."""
    model, _ = load_model("llama")
    scales = make_scales("head", centered=True)
    tokens = generate_expected(model, prompts, scales=scales)
    for options in (
        {"scales": make_scales("head")}, {"scales": make_scales("tensor", centered=True)},
        {"dtype": "fp8_e4m3"},
    ):  # fmt: skip
        assert generate_expected(model, prompts, **options) != tokens


# Each model, and each kind of dtype and scales. Options are options of FP8PagedCache.
@pytest.mark.parametrize(
    ("name", "dtype", "scales", "options"),
    [
        *(("llama", dtype, None, options) for dtype, options in DYNAMIC_OPTIONS.items()),
        ("llama", "hf_fp8kv_static", make_scales("tensor"), {}),
        (
            "llama",
            "hf_fp8kv_e4m3_static",
            make_scales("head", centered=True),
            {"dtype": "fp8_e4m3"},
        ),
        ("llama", "hf_fp8kv_e3m4_static", make_scales("channel"), {"dtype": "fp8_e3m4"}),
        ("qwen2", "hf_fp8kv_static", make_scales("head", centered=True), {}),
        ("mistral", "hf_fp8kv_e3m4", None, {"dtype": "fp8_e3m4"}),
        ("gemma2", "hf_fp8kv_static", make_scales("head", centered=True), {}),
        ("gpt_oss", "hf_fp8kv_e3m4", None, {"dtype": "fp8_e3m4"}),
    ],
    ids=str,
)
def test_vllm_gives_the_tokens_of_transformers(
    load_model, prompts, serve, tmp_path, name, dtype, scales, options
):
    model, folder = load_model(name)
    if scales is not None:
        scales.save_pretrained(tmp_path)
        options = {**options, "scales": scales}
    llm = serve(folder, dtype, None if scales is None else tmp_path)
    assert generate(llm, prompts)[0] == generate_expected(model, prompts, **options)


def test_skipped_layers_keep_the_dtype_of_the_model(load_model, prompts, serve):
    model, folder = load_model("llama")
    llm = serve(folder, "hf_fp8kv_e3m4", kv_cache_dtype_skip_layers=["0"])
    expected = generate_expected(model, prompts, skip_layers=[0], dtype="fp8_e3m4")
    assert generate(llm, prompts)[0] == expected


def test_prefixes_of_earlier_requests_are_read(load_model, prompts, serve):
    model, folder = load_model("llama")
    llm = serve(folder, "hf_fp8kv_e3m4")
    expected = generate_expected(model, prompts, dtype="fp8_e3m4")
    assert generate(llm, prompts)[0] == expected
    longer_prompts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    tokens, num_cached = generate(llm, longer_prompts)
    assert tokens == generate_expected(model, longer_prompts, dtype="fp8_e3m4")
    # Only full blocks of 32 tokens are cached, and the last token is not stored yet.
    assert num_cached == [(len(prompt) - 1) // 32 * 32 for prompt in longer_prompts]


def test_reused_blocks_do_not_change_the_tokens(load_model, prompts, serve):
    """Requests wait, are preempted and recomputed. Blocks contain bytes of earlier requests."""
    model, folder = load_model("llama")
    llm = serve(folder, "hf_fp8kv_e3m4", num_gpu_blocks_override=17, enable_prefix_caching=False)
    expected = generate_expected(model, prompts, dtype="fp8_e3m4")
    for _ in range(2):
        assert generate(llm, prompts)[0] == expected


def test_a_saved_plan_gives_the_tokens_of_transformers(load_model, prompts, serve, tmp_path):
    model, folder = load_model("qwen2")
    plan = choose_plan(model, prompts)
    assert any(layer.v.rotated for layer in plan.plan.values())
    plan.save_pretrained(tmp_path)
    tokens, _ = generate(serve(folder, "hf_fp8kv", plan=tmp_path), prompts)
    assert tokens == generate_expected(model, prompts, plan=plan)


@pytest.mark.parametrize(
    ("name", "sides"), [("mistral", "K and V"), ("gpt_oss", "V"), ("gemma2", "K")]
)
def test_a_layer_may_keep_the_dtype_of_the_model(load_model, prompts, serve, tmp_path, name, sides):
    """Layer 0 has larger pages. The second call reads blocks of the first call."""
    model, folder = load_model(name)
    plan = protected_plan_for(model, sides)
    plan.save_pretrained(tmp_path)
    llm = serve(folder, "hf_fp8kv", plan=tmp_path)
    expected = generate_expected(model, prompts, plan=plan)
    for _ in range(2):
        tokens, num_cached = generate(llm, prompts)
        assert tokens == expected
    assert any(num_cached)


def test_the_transformers_backend_of_vllm_gives_the_same_tokens(load_model, prompts, serve):
    model, folder = load_model("qwen3")
    # transformers runs first, because vLLM patches its class, which breaks existing instances.
    expected = generate_expected(model, prompts, dtype="fp8_e4m3")
    tokens, _ = generate(serve(folder, "hf_fp8kv_e4m3", model_impl="transformers"), prompts)
    assert tokens == expected


@pytest.mark.parametrize("dtype", ["hf_fp8kv", "hf_fp8kv_static"])
def test_the_number_of_blocks_matches_the_bytes_of_a_token(load_model, serve, tmp_path, dtype):
    """With `hf_fp8kv`, layer 0 keeps K in the dtype of the model, four bytes."""
    model, folder = load_model("llama")
    dim = conftest.HEAD_DIM
    has_plan = dtype == "hf_fp8kv"
    storage = protected_plan_for(model, "K") if has_plan else make_scales("tensor")
    storage.save_pretrained(tmp_path)
    options = {"plan" if has_plan else "scales": tmp_path}
    llm = serve(folder, dtype, **options, kv_cache_memory_bytes=32 << 20)
    slot_bytes = 2 * dim + (4 if DTYPES[dtype].is_dynamic else 0)
    token_bytes = conftest.NUM_LAYERS * slot_bytes + (3 * dim if has_plan else 0)
    expected_blocks = (32 << 20) / (conftest.NUM_HEADS * 32 * token_bytes)
    num_blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert num_blocks == pytest.approx(expected_blocks, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "sides"),
    [
        ("hf_fp8kv_static", None), ("hf_fp8kv", None), ("hf_fp8kv", "K"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_the_pool_holds_the_bytes_of_the_cache(load_model, prompts, serve, tmp_path, dtype, sides):
    """Compare each code and scale in vLLM's pool, token by token."""
    model, folder = load_model("llama")
    if dtype == "hf_fp8kv":
        plan = choose_plan(model) if sides is None else protected_plan_for(model, sides)
        plan.save_pretrained(tmp_path)
        options, scales, plan_folder = {"plan": plan}, None, tmp_path
    else:
        options, scales = make_cache_options(dtype, tmp_path)
        plan_folder = None
    llm = serve(folder, dtype, scales, plan_folder, enable_prefix_caching=False)
    prompt = prompts[-1]
    generate(llm, [prompt], 1)
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    cache = FP8PagedCache(model.config, prefill="stored", page_size=32, **options)
    model(torch.tensor([prompt]), past_key_values=cache)
    for index, layer in enumerate(cache.layers):
        attention = layers[f"model.layers.{index}.self_attn.attn"]
        pages = attention.impl.view_stored_layer(attention.kv_cache).pages
        expected = get_pages(layer.keys)
        code_pairs = [(pages.k_codes, expected.k_codes), (pages.v_codes.mT, expected.v_codes.mT)]
        if scales is None:
            code_pairs.append((pages.token_scales, expected.token_scales))
        for block, start in enumerate(range(0, len(prompt), 32)):
            num_tokens = min(32, len(prompt) - start)
            for pool_codes, cache_codes in code_pairs:
                # vLLM reserves block 0. The first request gets the following blocks in order.
                page_codes = cache_codes[expected.table[0, block]]
                is_different = pool_codes[block + 1, :, :num_tokens] != page_codes[:, :num_tokens]
                if page_codes.dtype == torch.float32:  # sums have a different order
                    error = pool_codes[block + 1, :, :num_tokens] - page_codes[:, :num_tokens]
                    is_different = error.abs() > 1e-4
                # In layer 1, a code may depend on the last bit of a sum in layer 0.
                assert is_different.sum() <= index
