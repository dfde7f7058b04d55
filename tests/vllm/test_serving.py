"""Tests that vLLM with FP8 pages gives the greedy tokens of `FP8PagedCache(prefill="stored")`."""

import pytest

from hf_fp8kv import choose_plan

from ..helpers.planned import make_protected_plan_for
from .conftest import generate, generate_expected, make_scales

DYNAMIC_OPTIONS = {
    "hf_fp8kv": {},
    "hf_fp8kv_e2m5": {"dtype": "fp8_e2m5"},
    "hf_fp8kv_int8": {"dtype": "int8"},
}


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
    load_model, prompts, start_engine, tmp_path, name, dtype, scales, options
):
    model, folder = load_model(name)
    if scales is None:
        llm = start_engine(folder, dtype)
    else:
        scales.save_pretrained(tmp_path)
        llm = start_engine(folder, dtype, tmp_path)
    tokens, _ = generate(llm, prompts)
    assert tokens == generate_expected(model, prompts, scales=scales, **options)


def test_skipped_layers_keep_the_dtype_of_the_model(load_model, prompts, start_engine):
    model, folder = load_model("llama")
    llm = start_engine(folder, "hf_fp8kv_e3m4", kv_cache_dtype_skip_layers=["0"])
    expected = generate_expected(model, prompts, skip_layers=[0], dtype="fp8_e3m4")
    assert generate(llm, prompts)[0] == expected


def test_prefixes_of_earlier_requests_are_read(load_model, prompts, start_engine):
    model, folder = load_model("llama")
    llm = start_engine(folder, "hf_fp8kv_e3m4")
    expected = generate_expected(model, prompts, dtype="fp8_e3m4")
    assert generate(llm, prompts)[0] == expected
    longer_prompts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    tokens, num_cached = generate(llm, longer_prompts)
    assert tokens == generate_expected(model, longer_prompts, dtype="fp8_e3m4")
    # Only full blocks of 32 tokens are cached, and the last token is not stored yet.
    assert num_cached == [(len(prompt) - 1) // 32 * 32 for prompt in longer_prompts]


def test_reused_blocks_do_not_change_the_tokens(load_model, prompts, start_engine):
    # Requests wait, are preempted and recomputed. Blocks contain bytes of earlier requests.
    model, folder = load_model("llama")
    llm = start_engine(
        folder, "hf_fp8kv_e3m4", num_gpu_blocks_override=17, enable_prefix_caching=False
    )
    expected = generate_expected(model, prompts, dtype="fp8_e3m4")
    for _ in range(2):
        assert generate(llm, prompts)[0] == expected


def test_a_saved_plan_gives_the_tokens_of_transformers(load_model, prompts, start_engine, tmp_path):
    model, folder = load_model("qwen2")
    plan = choose_plan(model, prompts)
    assert any(layer.v.rotated for layer in plan.plan.values())
    plan.save_pretrained(tmp_path)
    tokens, _ = generate(start_engine(folder, "hf_fp8kv", plan=tmp_path), prompts)
    assert tokens == generate_expected(model, prompts, plan=plan)


@pytest.mark.parametrize(
    ("name", "sides"), [("mistral", "K and V"), ("gpt_oss", "V"), ("gemma2", "K")]
)
def test_a_layer_may_keep_the_dtype_of_the_model(
    load_model, prompts, start_engine, tmp_path, name, sides
):
    # Layer 0 has larger pages. The second call reads blocks of the first call.
    model, folder = load_model(name)
    plan = make_protected_plan_for(model, sides)
    plan.save_pretrained(tmp_path)
    llm = start_engine(folder, "hf_fp8kv", plan=tmp_path)
    expected = generate_expected(model, prompts, plan=plan)
    for _ in range(2):
        tokens, num_cached = generate(llm, prompts)
        assert tokens == expected
    assert any(num_cached)


def test_the_transformers_backend_of_vllm_gives_the_same_tokens(load_model, prompts, start_engine):
    model, folder = load_model("qwen3")
    # transformers runs first, because vLLM patches its class, which breaks existing instances.
    expected = generate_expected(model, prompts, dtype="fp8_e4m3")
    tokens, _ = generate(start_engine(folder, "hf_fp8kv_e4m3", model_impl="transformers"), prompts)
    assert tokens == expected
