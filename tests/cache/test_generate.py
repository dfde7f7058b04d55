"""Tests of generate() on tiny models. dtype="auto" must give the tokens of DynamicCache."""

import copy
import functools
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, EncoderDecoderCache

from hf_fp8kv import (
    ConfigError,
    FP8PagedCache,
    KVScales,
    OutOfPagesError,
    calibrate,
    check_model,
    choose_plan,
    disable,
    enable,
    serving,
    summary,
    tensor_parallel,
)
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.modeling.model_support import CACHE
from hf_fp8kv.prefix.generate import CHUNKS_NEED_EMPTY_CACHE
from tests.cache.public import get_shared_variant, list_tensors
from tests.helpers.assertions import assert_same
from tests.helpers.grids import pairwise
from tests.helpers.margins import require_wide_margins
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text

GREEDY = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# Ten times the change in a logit when these models add float32 values in a different order.
MIN_MARGIN = 1e-4
# Prompts have 13 tokens, and 11 are generated, so the oldest tokens leave each window of 8 tokens.
MODELS = (
    "gqa", "mha", "sliding", "sliding_and_full", "softcap", "sinks", "kv_sharing", "latent",
)  # fmt: skip


def get_stock_attention(name: str) -> str:
    """Return the name of a model's stock attention. "sinks" and "softcap" do not support sdpa."""
    return "eager" if name in ("sinks", "softcap") else "sdpa"


def get_model(name: str, attention: str) -> tuple[Any, dict[str, torch.Tensor]]:
    return get_shared_variant(
        name, get_stock_attention(name) if attention == "stock" else attention
    )


def make_cache(model: Any, **keywords: Any) -> FP8PagedCache:
    return FP8PagedCache(model.config, **{"page_size": 8, **keywords})


def generate(model: Any, inputs: dict[str, Any], cache: Any, **keywords: Any) -> torch.Tensor:
    """Return tokens. The logit of each greedy token must lead by more than rounding errors.

    Beams and drafts are not checked. A draft model would use the same logits processors.
    """
    if keywords.keys().isdisjoint({"num_beams", "prompt_lookup_num_tokens", "assistant_model"}):
        keywords.setdefault("logits_processor", require_wide_margins(MIN_MARGIN))
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **keywords})


def select_unpadded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[1:] for name, tensor in inputs.items()}


@functools.cache
def generate_stock(name: str, is_unpadded: bool = False, **keywords: Any) -> torch.Tensor:
    stock_model, inputs = get_shared_variant(name, get_stock_attention(name))
    inputs = select_unpadded(inputs) if is_unpadded else inputs
    return generate(stock_model, inputs, DynamicCache(config=stock_model.config), **keywords)


for_each_model = pytest.mark.parametrize(
    ("name", "prefill", "attention"),
    [
        *((name, "exact", "fp8_paged") for name in MODELS[::2]),
        *((name, "stored", "fp8_paged") for name in MODELS[1::2]),
        ("gqa", "stored", "stock"), ("sliding_and_full", "exact", "stock"),
    ],
)  # fmt: skip


@for_each_model
def test_greedy_and_beams_give_the_same_tokens(name: str, prefill: str, attention: str) -> None:
    model, inputs = get_model(name, attention)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    cases = ({}, None), (beams, None), ({"prefill_chunk_size": 5}, None), ({}, 41), (beams, 41)
    for keywords, max_len in cases:
        cache = make_cache(model, dtype="auto", prefill=prefill, max_cache_len=max_len)
        tokens = generate(model, inputs, cache, disable_compile=True, **keywords)
        assert_same(tokens, generate_stock(name, **keywords), (keywords, max_len))


@for_each_model
@torch.no_grad()
def test_drafts_are_rolled_back(name: str, prefill: str, attention: str) -> None:
    model, inputs = get_model(name, attention)
    expected = generate_stock(name, is_unpadded=True)
    draft, _ = build_variant(name, attn_implementation=get_stock_attention(name))
    for weight in draft.parameters():
        if weight.ndim > 1:
            weight.add_(0.02 * weight.std() * torch.randn_like(weight))
    lookup = {"prompt_lookup_num_tokens": 4}
    for keywords, max_len in ((lookup, None), ({"assistant_model": draft}, 60)):
        cache = make_cache(model, dtype="auto", prefill=prefill, max_cache_len=max_len)
        tokens = generate(model, select_unpadded(inputs), cache, disable_compile=True, **keywords)
        assert_same(tokens, expected, (list(keywords), max_len))
        assert cache.get_seq_length() >= expected.shape[1] - 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gqa", "fp8_e4m3"), ("sliding", "fp8_e3m4"), ("sliding_and_full", "fp8_e4m3"),
        ("sinks", "fp8_e3m4"), ("kv_sharing", "fp8_e4m3"),
    ],
)  # fmt: skip
def test_chunks_and_drafts_keep_the_tokens_of_stored_prompts(name: str, dtype: str) -> None:
    """With prefill="stored", all calls read the same bytes, however prompts are split."""
    model, inputs = get_model(name, "fp8_paged")
    options = {"dtype": dtype, "prefill": "stored"}
    expected = generate(model, inputs, make_cache(model, **options))
    tokens = generate(model, inputs, make_cache(model, **options), prefill_chunk_size=4)
    assert_same(tokens, expected)
    for keywords in ({}, {"prompt_lookup_num_tokens": 4}):
        tokens = generate(model, select_unpadded(inputs), make_cache(model, **options), **keywords)
        assert_same(tokens, expected[1:], keywords)  # padding of the first row changes nothing


@pytest.mark.parametrize(
    ("name", "keywords"),
    [("sliding_and_full", {"dtype": "int8"}), ("kv_sharing", {}), ("hybrid", {})],
    ids=str,
)
def test_all_copies_continue_with_the_same_tokens(
    name: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    model, inputs = get_shared_variant(name, "fp8_paged")
    prompt = select_unpadded(inputs)
    expected = generate(model, prompt, make_cache(model, **keywords))
    cache = make_cache(model, **keywords)
    ids = generate(model, prompt, cache, max_new_tokens=5)
    copies = {
        "fork": cache.fork(),
        "deepcopy": copy.deepcopy(cache),
        "pickle": pickle.loads(pickle.dumps(cache)),
    }
    if name != "hybrid":
        copies["save"] = FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))
    copies["original"] = cache
    # A mask is necessary, because a generated token may be the padding token.
    next_inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for method, copied_cache in copies.items():
        assert_same(generate(model, next_inputs, copied_cache, max_new_tokens=6), expected, method)


@pytest.mark.parametrize(
    ("name", "has_cross_cache"),
    [("cross_attention", True), ("position_bias", True), ("speech", True), ("speech", False)],
)
def test_encoder_decoders_give_the_same_tokens(name: str, has_cross_cache: bool) -> None:
    model, inputs = build_variant(name)
    options = {**GREEDY, "max_new_tokens": 12}
    expected = model.generate(**inputs, **options)
    for attention in (model.config._attn_implementation, "fp8_paged"):
        model.set_attn_implementation(attention)
        cache: Any = make_cache(model, dtype="auto")
        if has_cross_cache:
            cache = EncoderDecoderCache(cache, make_cache(model, dtype="auto"))
        actual = model.generate(**inputs, past_key_values=cache, **options)
        assert_same(actual, expected, attention)
        fp8_cache = EncoderDecoderCache(make_cache(model), make_cache(model))
        fp8_tokens = model.generate(**inputs, past_key_values=fp8_cache, **options)
        assert fp8_tokens.shape == expected.shape
    if name == "cross_attention":
        caches = EncoderDecoderCache(*(make_cache(model, dtype="auto") for _ in range(2)))
        actual = model.generate(
            **select_unpadded(inputs), past_key_values=caches, prompt_lookup_num_tokens=3, **options
        )
        assert_same(actual, expected[1:], "after a rollback")


def test_a_model_may_change_to_flex_attention_between_steps() -> None:
    model, _ = build_variant("gqa", attn_implementation="fp8_paged")
    cache = make_cache(model, dtype="auto", prefill="stored")
    for name in ("fp8_paged", "flex_attention", "fp8_paged", "flex_attention"):
        model.config._attn_implementation = name
        for index in (0, 1):
            key, _ = cache.update(*torch.randn(2, 1, 2, 1, 16), index)
            assert (type(key) is torch.Tensor) == (name == "flex_attention")


# All pairs of values occur at least once. The last case needs a mask without padding, because
# preallocated layers of transformers return unused positions.
@pytest.mark.parametrize(
    ("name", "skipped", "max_cache_len", "attention", "is_unpadded"),
    [
        *(
            (*case, False)
            for case in pairwise(
                ["sliding", "sliding_and_full"], [(0,), (-1,)], [None, 41], ["stock", "fp8_paged"]
            )
        ),
        ("gqa", (0,), 60, "fp8_paged", True),
    ],
)
def test_skipped_layers_give_the_same_tokens(
    name: str, skipped: tuple[int], max_cache_len: int | None, attention: str, is_unpadded: bool
) -> None:
    model, inputs = get_model(name, attention)
    inputs = select_unpadded(inputs) if is_unpadded else inputs
    cache = make_cache(model, dtype="auto", skip_layers=skipped, max_cache_len=max_cache_len)
    tokens = generate(model, inputs, cache, disable_compile=True)
    assert_same(tokens, generate_stock(name, is_unpadded))


# Models with layers of transformers, which hold a recurrent state, K and V, or both. Each case also
# has options and a preallocated length.
for_each_stock_layer = pytest.mark.parametrize(
    ("name", "keywords", "max_cache_len"),
    [
        ("jamba", {}, 60), ("falcon_h1", {}, None),
        ("sliding_and_full", {"skip_layers": ["sliding_attention"]}, 60),
    ],
)  # fmt: skip
SHORT = {"max_new_tokens": 3}


def make_prompt(num_rows: int, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 98, (num_rows, num_tokens), generator=generator)


@for_each_stock_layer
def test_a_reset_cache_accepts_any_batch(
    name: str, keywords: dict[str, Any], max_cache_len: int | None
) -> None:
    model, _ = get_shared_variant(name, "fp8_paged")
    keywords = {**keywords, "dtype": "auto", "max_cache_len": max_cache_len}
    cache = make_cache(model, **keywords)
    calls = ((1, cache.reset), (3, lambda: cache.crop(-100)), (1, cache.reset))
    for num_rows, empty in calls:
        prompt = {"input_ids": make_prompt(num_rows, 13, num_rows)}
        expected = generate(model, prompt, make_cache(model, **keywords), **SHORT)
        assert_same(generate(model, prompt, cache, **SHORT), expected, num_rows)
        copies = (cache.fork(), pickle.loads(pickle.dumps(cache)))
        empty()
        cache.batch_repeat_interleave(2)  # an empty cache has no sequences
        for copied_cache in copies:
            copied_cache.reset()
            two_rows = {"input_ids": make_prompt(2, 13, num_rows)}
            expected = generate(model, two_rows, make_cache(model, **keywords), **SHORT)
            tokens = generate(model, two_rows, copied_cache, **SHORT)
            assert_same(tokens, expected, ("a copy", num_rows))


@for_each_stock_layer
def test_batch_operations_select_every_state(
    name: str, keywords: dict[str, Any], max_cache_len: int | None
) -> None:
    model, _ = get_shared_variant(name, "fp8_paged")
    keywords = {**keywords, "dtype": "auto", "max_cache_len": max_cache_len}
    prompt = make_prompt(3, 13, 1)
    later_tokens = make_prompt(6, 4, 2)
    # Names of methods, their arguments, and the rows of the prompt that the cache then holds.
    changes: tuple[tuple[str, Any, list[int]], ...] = (
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([2, 0]), [2, 0]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
        ("reorder_cache", torch.tensor([1, 1, 0]), [1, 1, 0]),
    )
    for method, argument, rows in changes:
        cache = make_cache(model, **keywords)
        tokens = generate(model, {"input_ids": prompt}, cache, **SHORT)
        getattr(cache, method)(argument)
        inputs = {"input_ids": torch.cat([tokens[rows], later_tokens[: len(rows)]], 1)}
        expected = generate(model, inputs, make_cache(model, **keywords), **SHORT)
        assert_same(generate(model, inputs, cache, **SHORT), expected, (method, rows))


def test_a_skipped_layer_refuses_tokens_past_its_end() -> None:
    model, _ = get_shared_variant("gqa", "fp8_paged")
    cache = make_cache(model, dtype="auto", max_cache_len=20, skip_layers=[0])
    with pytest.raises(OutOfPagesError, match="20"):
        generate(model, {"input_ids": make_prompt(1, 21, 1)}, cache)
    with pytest.raises(OutOfPagesError, match="20"):
        generate(model, {"input_ids": make_prompt(1, 13, 1)}, cache)
    assert cache.host_length() == int(cache.layers[0].get_seq_length()) == 20


def test_a_crop_refuses_recurrent_states_that_record_the_past() -> None:
    model, _ = get_shared_variant("jamba", "fp8_paged")
    cache = make_cache(model, dtype="auto")
    cache.activate_past_recording()
    model(make_prompt(1, 13, 1), past_key_values=cache)
    with pytest.raises(ConfigError, match="crop"):
        cache.crop(-2)
    assert cache.host_length() == 13
    cache.crop(0)


def test_the_mask_has_the_window_that_a_model_does_not_pass_to_attention() -> None:
    stock_model, inputs = build_variant("qwen2_moe", use_sliding_window=True, max_window_layers=0)
    model, _ = build_variant("qwen2_moe", use_sliding_window=True, max_window_layers=0)
    model.config.model_type = "a type that no table names"
    model.set_attn_implementation("fp8_paged")
    expected = generate(stock_model, inputs, DynamicCache(config=stock_model.config))
    assert_same(generate(model, inputs, make_cache(model, dtype="auto")), expected)


def test_fp8_paged_without_a_paged_cache_is_ordinary_attention() -> None:
    model, inputs = build_variant("sliding", attn_implementation="fp8_paged")
    stock_model, _ = build_variant("sliding", attn_implementation="sdpa")
    for keywords in ({}, {"use_cache": False}):
        expected = stock_model.generate(**inputs, **GREEDY, **keywords)
        assert_same(model.generate(**inputs, **GREEDY, **keywords), expected)
    model.train()
    stock_model.train()
    losses = [
        each_model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        for each_model in (stock_model, model)
    ]
    assert torch.allclose(*losses, rtol=1e-5)
    losses[1].backward()


@torch.no_grad()
@pytest.mark.parametrize("num_columns", [3, 15, 16, 17])
def test_a_short_mask_gives_the_logits_of_sdpa(num_columns: int) -> None:
    """With 13 cached and 3 new tokens, transformers hides tokens that the mask does not cover."""
    model, inputs = get_shared_variant("gqa", "fp8_paged")
    stock_model, _ = get_shared_variant("gqa", "sdpa")
    mask = torch.ones(2, num_columns, dtype=torch.long)
    mask[0, :2] = 0
    logits = []
    for each_model in (model, stock_model):
        cache = DynamicCache()
        each_model(inputs["input_ids"], past_key_values=cache)
        next_ids = inputs["input_ids"][:, :3]
        logits.append(each_model(next_ids, attention_mask=mask, past_key_values=cache).logits)
    assert torch.allclose(*logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_custom_4d_mask_gives_the_same_logits() -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    stock_model, _ = build_variant("gqa", attn_implementation="sdpa")
    ids = inputs["input_ids"]
    is_visible = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    is_visible[:, :, 6:, 2] = False
    next_is_visible = torch.ones(2, 1, 3, 16, dtype=torch.bool).tril(13)
    next_is_visible[0, :, :, 5] = False
    calls = ((ids, is_visible), (ids[:, :3], next_is_visible))
    conversions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda mask: mask,
        lambda mask: mask.expand(-1, 4, -1, -1).clone(),
        lambda mask: mask[:1] & mask[1:],
        lambda mask: torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min),
    )
    for convert in conversions:
        stock_cache = DynamicCache(config=stock_model.config)
        cache = make_cache(model, dtype="auto", prefill="stored")
        for new_ids, mask in calls:
            options = {"attention_mask": convert(mask)}
            expected = stock_model(new_ids, past_key_values=stock_cache, **options).logits
            actual = model(new_ids, past_key_values=cache, **options).logits
            assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [enable, disable, check_model, choose_plan, tensor_parallel, serving.enable, serving.disable],
)
def test_the_model_inside_a_wrapper_is_named(function: Any) -> None:
    model, _ = build_variant("gqa")
    wrappers = {"model": SimpleNamespace(model=model), "module": torch.nn.DataParallel(model)}
    for attribute, wrapper in wrappers.items():
        with pytest.raises(ConfigError, match=rf"^model: .*\(its attribute {attribute}\)"):
            function(wrapper)
    values = {"the class LlamaForCausalLM": type(model), "str": "some/model", "NoneType": None}
    for name, value in values.items():
        with pytest.raises(ConfigError, match=f"^model: .*got {name}. Load"):
            function(value)


def test_errors_name_the_function_that_was_called() -> None:
    model, inputs = build_variant("gqa")
    with pytest.raises(ConfigError, match=r"^enable: .*page_size.*got config"):
        enable(model, config=8)
    assert not vars(model).keys() & {"_prepare_cache_for_generation", "init_continuous_batching"}
    enable(model)
    ids = inputs["input_ids"][1:]
    model_copy = copy.deepcopy(model)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: model.generate_batch(ids.tolist(), progress_bar=False),
        lambda: model.generate(ids, cache_implementation="paged"),
        model_copy.init_continuous_batching,
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"Call serving.enable\(model\)"):
            call()
    disable(model)
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.parametrize(("max_cache_len", "backend"), [(None, "auto"), (64, "torch")])
def test_inference_mode_gives_the_same_tokens(max_cache_len: int | None, backend: str) -> None:
    model, inputs = get_shared_variant("gqa", "fp8_paged")
    prompt = select_unpadded(inputs)
    longer_ids = prompt["input_ids"].repeat(1, 2)
    longer_prompt = {"input_ids": longer_ids, "attention_mask": torch.ones_like(longer_ids)}
    outputs = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = make_cache(model, backend=backend, max_cache_len=max_cache_len)
        with mode():
            model(**prompt, past_key_values=cache)
        for branch in (cache, cache.fork()):
            branch.reorder_cache(torch.tensor([0]))
            outputs.append(generate(model, longer_prompt, branch, disable_compile=True))
    assert all(torch.equal(tokens, outputs[0]) for tokens in outputs)


def test_autocast_gives_the_same_tokens() -> None:
    model, inputs = build_variant("gqa", attn_implementation="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        no_margin: dict[str, Any] = {"logits_processor": None}
        expected = generate(model, inputs, DynamicCache(config=model.config), **no_margin)
        assert_same(generate(model, inputs, make_cache(model, dtype="auto"), **no_margin), expected)
        model.set_attn_implementation("fp8_paged")
        tokens = generate(model, inputs, make_cache(model, dtype="fp8_e4m3"), **no_margin)
    assert tokens.shape == expected.shape


# Phi-3 has other frequencies of RoPE past 24 tokens, and then computes all tokens again.
LONG_ROPE: dict[str, Any] = {
    "max_position_embeddings": 96,
    "original_max_position_embeddings": 24,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 24,
        "short_factor": [1.0 + 0.1 * i for i in range(8)], "short_mscale": 1.1,
        "long_factor": [3.0 + 2.0 * i for i in range(8)], "long_mscale": 1.2,
    },
}  # fmt: skip


def build_long_rope(name: str) -> tuple[Any, Any, torch.Tensor]:
    # A config changes the dict of its RoPE parameters.
    stock_model, _ = build_variant(name, **copy.deepcopy(LONG_ROPE))
    model, _ = build_variant(name, **copy.deepcopy(LONG_ROPE))
    enable(model, dtype="model", page_size=8)
    ids = torch.randint(4, 90, (2, 60), generator=torch.Generator().manual_seed(3))
    return model, stock_model, ids


@pytest.mark.parametrize("name", ["phi3", "phimoe", "phi4_multimodal"])
def test_a_cache_is_filled_again_when_the_frequencies_of_rope_change(name: str) -> None:
    model, stock_model, ids = build_long_rope(name)
    repeated_ids = ids[:1, :5].repeat(1, 4)
    lookup = {"prompt_lookup_num_tokens": 3}
    preallocated = FP8PagedCache(model.config, dtype="model", max_cache_len=64)
    call_lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: call_lengths.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    # Each case has a prompt, options of both models, and options of the model with the cache.
    cases: tuple[tuple[torch.Tensor, dict[str, Any], dict[str, Any]], ...] = (
        (ids[:, :16], {}, {}),  # the last of 11 new tokens crosses the border
        (ids[:, :24], {}, {"past_key_values": make_cache(model, dtype="model")}),
        (ids[:, :40], {}, {}),
        (ids[:, :20], {"num_beams": 3}, {}),
        (repeated_ids, {}, lookup),
        (ids[:, :20], {}, {"past_key_values": preallocated, "disable_compile": True}),
    )
    for prompt, keywords, fp8_keywords in cases:
        call_lengths.clear()
        output = model.generate(
            prompt, **GREEDY, **keywords, **fp8_keywords, return_dict_in_generate=True
        )
        # Phi-4 has no cache here. After it drops a cache, it would only receive the last token.
        expected = stock_model.generate(prompt, use_cache=False, **GREEDY, **keywords)
        case = (prompt.shape, keywords, list(fp8_keywords))
        assert_same(output.sequences, expected, case)
        cache = output.past_key_values
        assert isinstance(cache, FP8PagedCache), case
        assert cache is fp8_keywords.get("past_key_values", cache)
        if fp8_keywords is not lookup:
            # At the border, the model reads all tokens again.
            num_prompts = 2 if prompt.shape[1] <= 24 else 1
            assert sum(length > 1 for length in call_lengths) == num_prompts, case


def test_a_model_that_replaces_its_cache_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stock_model, ids = build_long_rope("phimoe")
    monkeypatch.setattr("hf_fp8kv.utils.warn_once._logged_messages", set())
    with caplog.at_level("WARNING"):
        choose_plan(stock_model)
        enable(model)
        model.generate(ids[:, :24], **GREEDY)
        assert summary(model).report.note
        assert "DynamicCache" not in caplog.text
        FP8PagedCache(stock_model.config)
        assert "generate() of PhimoeForCausalLM replaces its cache" in caplog.text
        assert "enable(model)" in caplog.text
    assert "replaces its cache" in str(check_model(stock_model))
    assert not check_model(build_variant("gqa")[0]).note


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("gqa", {"dtype": "adaptive"}),
        ("gqa", {"plan": "one for each layer", "skip_layers": (1,)}),
        ("gqa", {"plan": "one for each layer", "max_cache_len": 64}),
        ("gqa", {"scales": KVScales.uniform(3), "skip_layers": (3,)}),
        ("latent", {"plan": "one for each layer"}),
        ("softcap", {"skip_layers": "full_attention", "dtype": "adaptive"}),
    ],
)
def test_early_exit_gives_the_greedy_tokens(name: str, keywords: dict[str, Any]) -> None:
    """A draft uses the first layers of a plan, of scales and of `skip_layers`."""
    layer_types = ["sliding_attention", "full_attention"] * 2
    fields = {"layer_types": layer_types} if name == "softcap" else {}
    model, inputs = build_variant(name, num_hidden_layers=4, **fields)
    prompt = select_unpadded(inputs)
    keywords = {"prefill": "stored", **keywords}
    if "plan" in keywords:
        k_formats = ("fp8_e3m4", "int8 rotated", "fp8_e4m3", "fp8_e5m2")
        layer_plans = [LayerPlan.parse(k_format, "fp8_e3m4") for k_format in k_formats]
        plan = dict(enumerate(layer_plans))
        for index in keywords.get("skip_layers", ()):
            del plan[index]
        keywords["plan"] = plan
    enable(model, **keywords)
    plans: dict[int, Any] = {}
    hook = model.register_forward_hook(
        lambda module, _, out: plans.update({module.config.num_hidden_layers: out[CACHE].plan})
    )
    expected = model.generate(**prompt, **GREEDY, disable_compile=True)
    tokens = model.generate(**prompt, **GREEDY, assistant_early_exit=2, disable_compile=True)
    hook.remove()
    assert_same(tokens, expected)
    assert model.config.num_hidden_layers == 4
    if CHUNKS_NEED_EMPTY_CACHE and name == "softcap":
        return  # the forward pass of a draft receives a cache with all layers
    assert plans[2] == {index: plan for index, plan in plans[4].items() if index < 2}


@pytest.mark.parametrize(("error", "num_calls"), [(RuntimeError, 0), (KeyboardInterrupt, 2)])
def test_a_failed_draft_restores_the_number_of_layers(
    error: type[BaseException], num_calls: int
) -> None:
    model, inputs = build_variant("gqa", num_hidden_layers=4)
    enable(model)
    layer = model.model.layers[1]
    effects = [mock.DEFAULT] * num_calls + [error]
    layer.forward = mock.Mock(wraps=layer.forward, side_effect=effects)
    with pytest.raises(error):
        model.generate(**select_unpadded(inputs), **GREEDY, assistant_early_exit=2)
    assert model.config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gqa", "fused"), ("latent", "fused, latent"), ("hybrid", "fused"), ("alibi", "dense"),
        ("cross_attention", "fused"),
    ],
)  # fmt: skip
def test_check_model_reports_the_path(name: str, path: str) -> None:
    model, _ = build_variant(name)
    attention = model.config._attn_implementation
    report = check_model(model)
    assert json.loads(json.dumps(report.to_dict()))["path"] == report.path == path, str(report)
    assert ("dense" in str(report)) is (path == "dense")
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", ["mamba", "openai-gpt", "minimax", "blt"])
@pytest.mark.parametrize("keywords", [{}, {"deterministic": True}, {"dtype": "adaptive"}], ids=str)
def test_models_without_attention_are_refused(name: str, keywords: dict[str, Any]) -> None:
    model, _ = build_variant(name)
    assert check_model(model).path == "refused"
    with pytest.raises(ConfigError, match="can use this cache"):
        FP8PagedCache(model.config)
    with pytest.raises(ConfigError, match="can use this cache"):
        enable(model, **keywords)


@pytest.mark.parametrize("name", dict.fromkeys(["past_key_values", CACHE]))
def test_a_model_may_use_either_name_of_the_cache(name: str) -> None:
    """Model code on the Hub uses the name that transformers had before 5.24. No call warns."""
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    model_class = type(model)

    def old_forward(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return model_class.forward(self, *args, **{CACHE: past_key_values}, **kwargs)

    def new_forward(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        return model_class.forward(self, *args, **{CACHE: cache}, **kwargs)

    forward = old_forward if name == "past_key_values" else new_forward
    model.__class__ = type(model_class.__name__, (model_class,), {"forward": forward})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_model(model).path == "fused"
        calibrate(model, torch.randint(4, 90, (4, 24)).tolist(), max_length=24, progress=False)
        assert choose_plan(model).protection
        enable(model, training="stored")
        if name == CACHE:
            output = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
            assert isinstance(output[CACHE], FP8PagedCache)


def test_guidance_uses_a_separate_cache() -> None:
    model, inputs = get_shared_variant("gqa", "fp8_paged")
    stock_model, _ = get_shared_variant("gqa", "sdpa")
    options = {**select_unpadded(inputs), **GREEDY, "guidance_scale": 1.5}
    actual = model.generate(past_key_values=make_cache(model, dtype="auto"), **options)
    assert_same(actual, stock_model.generate(**options))


def test_flex_attention_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention is not compiled, because its CPU code cannot be built on all machines."""
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as flex_file

    wrapper_class = mock.Mock(return_value=lambda: flex_attention)
    monkeypatch.setattr(flex_file, "WrappedFlexAttention", wrapper_class)
    model, inputs = build_variant("sliding", attn_implementation="flex_attention")
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # flex attention warns that it is not compiled
        expected = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=6)
        cache = make_cache(model, dtype="auto")
        assert_same(generate(model, inputs, cache, max_new_tokens=6), expected)


@pytest.mark.skipif(CHUNKS_NEED_EMPTY_CACHE, reason="transformers' chunks change the tokens")
@pytest.mark.parametrize(("length", "chunk_size"), [(20, 7), (40, 7), (40, 30)])
def test_chunks_give_the_same_tokens_when_the_frequencies_of_rope_change(
    length: int, chunk_size: int
) -> None:
    model, stock_model, ids = build_long_rope("phi3")
    options = {**GREEDY, "prefill_chunk_size": chunk_size, "return_dict_in_generate": True}
    expected = stock_model.generate(ids[:, :length], **options)
    output = model.generate(ids[:, :length], **options)
    assert_same(output.sequences, expected.sequences)
    assert isinstance(output.past_key_values, FP8PagedCache)


@pytest.mark.parametrize(("name", "skipped"), [("jamba", ()), ("gqa", (0,)), ("sparse", ())])
def test_a_reset_keeps_addresses_for_the_same_batch(name: str, skipped: tuple[int, ...]) -> None:
    model, _ = get_shared_variant(name, "fp8_paged")
    cache = make_cache(model, dtype="auto", max_cache_len=60, skip_layers=skipped)
    addresses = []
    for seed in (1, 2):
        generate(model, {"input_ids": make_prompt(2, 13, seed)}, cache, **SHORT)
        stock_attributes = tree_leaves([vars(layer) for layer in cache.stock_layers])
        tensors = list_tensors(cache)
        tensors += [leaf for leaf in stock_attributes if isinstance(leaf, torch.Tensor)]
        addresses.append([tensor.data_ptr() for tensor in tensors])
        cache.reset()
    assert addresses[0] == addresses[1]
