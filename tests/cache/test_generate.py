"""Features of generate() on tiny models. dtype="auto" gives the tokens of DynamicCache."""

import copy
import functools
import io
import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_fp8kv import ConfigError, FP8PagedCache, calibrate, check_model, disable, enable
from hf_fp8kv.modeling.model_support import CACHE
from tests.cache.public import shared_tiny
from tests.helpers.assertions import assert_same
from tests.helpers.grids import pairwise
from tests.helpers.margins import wide_margins
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text

GREEDY = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# Ten times the change of a logit when these models add in a different order in float32.
LEAST_MARGIN = 1e-4
# Prompts have 13 tokens, and 11 more are generated, so tokens leave every window of 8.
MODELS = (
    "gqa", "mha", "sliding", "sliding_and_full", "softcap", "sinks", "kv_sharing", "latent",
)  # fmt: skip


def dense_attention(name: str) -> str:
    """Return the ordinary attention of a model. gpt-oss has no sdpa."""
    return "eager" if name in ("sinks", "softcap") else "sdpa"


def model_of(name: str, attention: str) -> tuple[Any, dict[str, torch.Tensor]]:
    return shared_tiny(name, dense_attention(name) if attention == "own" else attention)


def new_cache(model: Any, **keywords: Any) -> FP8PagedCache:
    return FP8PagedCache(model.config, **{"page_size": 8, **keywords})


def generate(model: Any, inputs: dict[str, Any], cache: Any, **keywords: Any) -> torch.Tensor:
    """Return the tokens of a model. Greedy tokens must win by a margin larger than rounding.

    An assistant's draft uses the same processors, so its tokens are not checked.
    """
    if keywords.keys().isdisjoint({"num_beams", "prompt_lookup_num_tokens", "assistant_model"}):
        keywords.setdefault("logits_processor", wide_margins(LEAST_MARGIN))
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **keywords})


def unpadded(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the second row of the prompt, which has no padding."""
    return {name: tensor[1:] for name, tensor in inputs.items()}


@functools.cache
def stock_answer(name: str, row: bool = False, **keywords: Any) -> torch.Tensor:
    """Return the tokens of the model with its ordinary attention and a `DynamicCache`."""
    stock, inputs = shared_tiny(name, dense_attention(name))
    cache = DynamicCache(config=stock.config)
    return generate(stock, unpadded(inputs) if row else inputs, cache, **keywords)


@pytest.fixture(params=["own", "fp8_paged"])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Grid: Each model once with "fp8_paged" and its own attention twice. `prefill` alternates, because
# it decides only what the first call reads. The full tier has all combinations.
def of_every_model(axis: str, values: tuple[str, str], names: Any = MODELS) -> pytest.MarkDecorator:
    fast = [(name, values[i % 2], "fp8_paged") for i, name in enumerate(names)]
    fast += [("gqa", values[1], "own"), ("sliding_and_full", values[0], "own")]
    every = itertools.product(names, values, ("own", "fp8_paged"))
    full = [pytest.param(*case, marks=pytest.mark.full) for case in every if case not in fast]
    return pytest.mark.parametrize(("name", axis, "attention"), [*fast, *full])


@of_every_model("prefill", ("exact", "stored"))
class TestAuto:
    """dtype="auto" stores exact values, so any difference is a lost or misplaced token."""

    def test_greedy_and_beams(self, name: str, prefill: str, attention: str) -> None:
        model, inputs = model_of(name, attention)
        for keywords in (
            {},
            {"num_beams": 3, "num_return_sequences": 2},
            {"prefill_chunk_size": 5},
        ):
            cache = new_cache(model, dtype="auto", prefill=prefill)
            tokens = generate(model, inputs, cache, **keywords)
            assert_same(tokens, stock_answer(name, **keywords), keywords)

    def test_rollback(self, name: str, prefill: str, attention: str) -> None:
        model, inputs = model_of(name, attention)
        row = unpadded(inputs)
        expected = stock_answer(name, row=True)
        draft, _ = tiny(name, attn_implementation=dense_attention(name))
        with torch.no_grad():
            for weight in draft.parameters():
                if weight.ndim > 1:
                    weight.add_(0.02 * weight.std() * torch.randn_like(weight))
        drafts = ({"prompt_lookup_num_tokens": 4}, {"assistant_model": draft})
        for keywords, room in (
            (drafts[0], None),
            (drafts[1], None),
            (drafts[prefill == "exact"], 60),
        ):
            cache = new_cache(model, dtype="auto", prefill=prefill, max_cache_len=room)
            tokens = generate(model, row, cache, disable_compile=True, **keywords)
            assert_same(tokens, expected, (list(keywords), room))
            assert cache.get_seq_length() >= expected.shape[1] - 1

    def test_preallocated_cache(self, name: str, prefill: str, attention: str) -> None:
        model, inputs = model_of(name, attention)
        cache = new_cache(model, dtype="auto", prefill=prefill, max_cache_len=41)
        for _ in range(2):
            tokens = generate(model, inputs, cache, disable_compile=True)
            assert_same(tokens, stock_answer(name))
            cache.reset()
        cache = new_cache(model, dtype="auto", prefill=prefill, max_cache_len=41)
        tokens = generate(model, inputs, cache, num_beams=3, disable_compile=True)
        assert_same(tokens, stock_answer(name, num_beams=3))


STORED = ("gqa", "sliding", "sliding_and_full", "sinks", "kv_sharing")


@of_every_model("dtype", ("fp8_e4m3", "fp8_e3m4"), STORED)
class TestStored:
    """With prefill="stored" every call reads the same bytes with any chunks."""

    def test_one_answer_per_prompt(self, name: str, dtype: str, attention: str) -> None:
        model, inputs = model_of(name, attention)

        def cache() -> FP8PagedCache:
            return new_cache(model, dtype=dtype, prefill="stored")

        expected = generate(model, inputs, cache())
        assert_same(generate(model, inputs, cache(), prefill_chunk_size=4), expected)
        row = unpadded(inputs)
        alone = generate(model, row, cache())
        assert_same(alone, expected[1:], "padding of a different row changed this row")
        assert_same(generate(model, row, cache(), prompt_lookup_num_tokens=4), alone)
        draft, _ = tiny(name, seed=1, attn_implementation=dense_attention(name))
        assert_same(generate(model, row, cache(), assistant_model=draft), alone)


# Grid: Each model once, and each kind of scales with the first model.
@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("gqa", {}), ("gqa", {"scales": 0.05}), ("sliding_and_full", {"plan": "fp8 centered"}),
        ("kv_sharing", {}), ("hybrid", {}),
    ],
    ids=str,
)  # fmt: skip
def test_all_copies_continue_with_the_same_tokens(
    name: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    model, inputs = shared_tiny(name, "fp8_paged")
    row = unpadded(inputs)
    expected = generate(model, row, new_cache(model, **keywords))
    cache = new_cache(model, **keywords)
    start = generate(model, row, cache, max_new_tokens=5)
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    copies = {
        "fork": cache.fork(),
        "deepcopy": copy.deepcopy(cache),
        "pickle": pickle.loads(pickle.dumps(cache)),
        "torch.save": torch.load(buffer, weights_only=False),
    }
    if name != "hybrid":
        copies["save"] = FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))
    copies["original"] = cache
    # A mask is necessary, because a generated token may be the padding token.
    text = {"input_ids": start, "attention_mask": torch.ones_like(start)}
    for method, twin in copies.items():
        rest = generate(model, text, twin, max_new_tokens=6)
        assert_same(rest, expected, method)


@pytest.mark.parametrize(
    ("name", "bare"),
    [("cross_attention", False), ("position_bias", False), ("speech", False), ("speech", True)],
)
def test_encoder_decoder(name: str, bare: bool) -> None:
    model, inputs = tiny(name)
    options = {**GREEDY, "max_new_tokens": 12}
    expected = model.generate(**inputs, **options)
    for attention in ("own", "fp8_paged"):
        if attention != "own":
            model.set_attn_implementation(attention)
        cache: Any = new_cache(model, dtype="auto")
        if not bare:
            cache = EncoderDecoderCache(cache, new_cache(model, dtype="auto"))
        actual = model.generate(**inputs, past_key_values=cache, **options)
        assert_same(actual, expected, attention)
        eight = EncoderDecoderCache(new_cache(model), new_cache(model))
        assert model.generate(**inputs, past_key_values=eight, **options).shape == expected.shape
        if name == "cross_attention":
            pair = EncoderDecoderCache(*(new_cache(model, dtype="auto") for _ in "ab"))
            row = {"past_key_values": pair, "prompt_lookup_num_tokens": 3, **unpadded(inputs)}
            assert_same(model.generate(**row, **options), expected[1:], "rolled back")


@pytest.mark.parametrize("name", [pytest.param("gqa", marks=pytest.mark.full), "sliding"])
def test_flex_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention is not compiled here, because its CPU code does not build everywhere."""
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as module

    monkeypatch.setattr(module, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    model, inputs = tiny(name, attn_implementation="flex_attention")
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # flex attention warns that it is not compiled
        expected = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=6)
        cache = new_cache(model, dtype="auto")
        assert_same(generate(model, inputs, cache, max_new_tokens=6), expected)


def test_a_model_may_change_to_flex_attention_between_steps() -> None:
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    cache = new_cache(model, dtype="auto", prefill="stored")
    for name in ("fp8_paged", "flex_attention", "fp8_paged", "flex_attention"):
        model.config._attn_implementation = name
        kinds = [type(cache.update(*torch.randn(2, 1, 2, 1, 16), layer)[0]) for layer in (0, 1)]
        assert [kind is torch.Tensor for kind in kinds] == [name == "flex_attention"] * 2


def test_guidance_uses_a_separate_cache() -> None:
    model, inputs = shared_tiny("gqa", "fp8_paged")
    stock, _ = shared_tiny("gqa", "sdpa")
    row = unpadded(inputs)
    options = {**GREEDY, "guidance_scale": 1.5}
    expected = stock.generate(**row, **options)
    actual = model.generate(**row, past_key_values=new_cache(model, dtype="auto"), **options)
    assert_same(actual, expected)


# Grid: A pairwise cover.
@pytest.mark.parametrize(
    ("name", "skipped", "length", "attention"),
    pairwise(["sliding", "sliding_and_full"], [(0,), (-1,)], [None, 41], ["own", "fp8_paged"]),
)
def test_skipped_layers_next_to_paged_layers(
    name: str, skipped: tuple[int], length: int | None, attention: str
) -> None:
    stock, inputs = shared_tiny(name, "sdpa" if attention == "own" else attention)
    cache = new_cache(stock, dtype="auto", skip_layers=skipped, max_cache_len=length)
    assert_same(generate(stock, inputs, cache, disable_compile=True), stock_answer(name))


def test_a_window_that_a_model_does_not_pass() -> None:
    """Masks must be complete if the attention function does not receive the window."""
    stock, inputs = tiny("qwen2_moe", use_sliding_window=True, max_window_layers=0)
    model, _ = tiny("qwen2_moe", use_sliding_window=True, max_window_layers=0)
    model.config.model_type = "a type that no table names"
    model.set_attn_implementation("fp8_paged")
    expected = generate(stock, inputs, DynamicCache(config=stock.config))
    assert_same(generate(model, inputs, new_cache(model, dtype="auto")), expected)


def test_fp8_paged_without_a_paged_cache_is_ordinary_attention() -> None:
    model, inputs = tiny("sliding", attn_implementation="fp8_paged")
    stock, _ = tiny("sliding", attn_implementation="sdpa")
    for keywords in ({}, {"use_cache": False}):
        expected = stock.generate(**inputs, **GREEDY, **keywords)
        assert_same(model.generate(**inputs, **GREEDY, **keywords), expected)
    model.train()
    stock.train()
    losses = [m(**inputs, labels=inputs["input_ids"], use_cache=False).loss for m in (stock, model)]
    assert torch.allclose(*losses, rtol=1e-5)
    losses[1].backward()


@torch.no_grad()
@pytest.mark.parametrize("columns", [3, 10, 15, 16, 17])
def test_a_short_mask_with_a_stock_cache(columns: int) -> None:
    """After 13 cached and 3 new tokens, transformers hides tokens that the mask does not cover."""
    model, inputs = shared_tiny("gqa", "fp8_paged")
    stock, _ = shared_tiny("gqa", "sdpa")
    mask = torch.ones(2, columns, dtype=torch.long)
    mask[0, :2] = 0
    logits = []
    for each in (model, stock):
        cache = DynamicCache()
        each(inputs["input_ids"], past_key_values=cache)
        extra = inputs["input_ids"][:, :3]
        logits.append(each(extra, attention_mask=mask, past_key_values=cache).logits)
    assert torch.allclose(*logits, rtol=1e-4, atol=1e-4)


def test_custom_4d_mask() -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    stock, _ = tiny("gqa", attn_implementation="sdpa")
    ids = inputs["input_ids"]
    visible = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    visible[:, :, 6:, 2] = False
    later = torch.ones(2, 1, 3, 16, dtype=torch.bool).tril(13)
    later[0, :, :, 5] = False
    extra = ids[:, :3]
    for form in (
        lambda m: m,
        lambda m: m[:, :].expand(-1, 4, -1, -1).clone(),
        lambda m: m[:1] & m[1:],
        lambda m: torch.zeros(m.shape).masked_fill(~m, torch.finfo(torch.float32).min),
    ):
        logits = []
        for m, cache in (
            (stock, DynamicCache(config=stock.config)),
            (model, new_cache(model, dtype="auto", prefill="stored")),
        ):
            with torch.no_grad():
                first = m(input_ids=ids, attention_mask=form(visible), past_key_values=cache)
                second = m(input_ids=extra, attention_mask=form(later), past_key_values=cache)
            logits.append(torch.cat([first.logits, second.logits], 1))
        assert torch.allclose(*logits, rtol=1e-4, atol=1e-4)


def test_enable_and_disable() -> None:
    model, inputs = tiny("gqa")
    before = model.config._attn_implementation
    options = {**GREEDY, "return_dict_in_generate": True}
    expected = generate(model, inputs, new_cache(model, page_size=64, dtype="fp8_e3m4"))
    assert enable(model, dtype="fp8_e3m4") is model
    out = model.generate(**inputs, **options)
    assert isinstance(out.past_key_values, FP8PagedCache)
    assert_same(out.sequences, expected)
    assert isinstance(
        model.generate(**inputs, past_key_values=DynamicCache(), **options).past_key_values,
        DynamicCache,
    )
    enable(model, dtype="auto")
    plans = model.generate(**inputs, **options).past_key_values.plan.values()
    assert {plan.k.format for plan in plans} == {"auto"}
    disable(model)
    disable(model)
    assert model.config._attn_implementation == before
    assert type(model.generate(**inputs, **options).past_key_values) is DynamicCache
    with pytest.raises(ConfigError, match="dtype"):
        enable(model, dtype="int4")


def test_enable_long_speech() -> None:
    """Whisper generates once for each segment of sound, each with a new cache."""
    model, _ = tiny("speech")
    config = model.generation_config
    config.no_timestamps_token_id, config.is_multilingual = 90, False
    config.return_timestamps, config.max_initial_timestamp_index = True, 2
    sound = torch.randn(1, 16, 3 * 128, generator=torch.Generator().manual_seed(1))
    options = {"return_timestamps": True, "max_new_tokens": 8}
    options["attention_mask"] = torch.ones(1, 3 * 128, dtype=torch.long)
    expected = model.generate(sound, **options)
    enable(model, dtype="auto")
    assert_same(model.generate(sound, **options), expected)
    disable(model)


@pytest.mark.parametrize(("length", "backend"), [(None, "auto"), (64, "torch")])
def test_inference_mode_and_outside(length: int | None, backend: str) -> None:
    model, inputs = shared_tiny("gqa", "fp8_paged")
    ids, options = inputs["input_ids"][1:], {"backend": backend, "max_cache_len": length}
    longer = {"input_ids": torch.cat([ids, ids[:, :2]], 1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    answers = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = new_cache(model, **options)
        with mode():
            model(ids, past_key_values=cache)
        fork = cache.fork()
        for branch in (cache, fork):
            branch.reorder_cache(torch.tensor([0]))
            answers.append(generate(model, longer, branch, disable_compile=True))
        cache.reset()
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_autocast(dtype: str, attention: str) -> None:
    model, inputs = tiny("gqa", attn_implementation="sdpa")
    if attention != "own":
        model.set_attn_implementation(attention)
    with torch.autocast("cpu", torch.bfloat16):
        # 16 bits have no margin, but both caches use the same arithmetic.
        free: dict[str, Any] = {"logits_processor": None}
        expected = generate(model, inputs, DynamicCache(config=model.config), **free)
        actual = generate(model, inputs, new_cache(model, dtype=dtype), **free)
    if dtype == "auto" and attention == "own":
        assert_same(actual, expected)
    assert actual.shape == expected.shape


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gqa", "fused"), ("sliding_and_full", "fused"), ("sinks", "fused"),
        ("latent", "fused, latent"),
        ("kv_sharing", "fused"), ("hybrid", "fused"), ("alibi", "dense"),
        ("cross_attention", "fused"),
    ],
)  # fmt: skip
def test_check_model(name: str, path: str) -> None:
    model, _ = tiny(name)
    before = model.config._attn_implementation
    report = check_model(model)
    assert report.path == path, str(report)
    assert report.to_dict()["path"] == path
    assert model.config._attn_implementation == before
    if path == "dense":
        assert "dense" in str(report)


@pytest.mark.parametrize("kind", ["mamba", "openai-gpt", "minimax", "blt"])
def test_models_without_attention_are_refused(kind: str) -> None:
    model, _ = tiny(kind)
    assert check_model(model).path == "refused"
    with pytest.raises(ConfigError, match="can use this cache"):
        FP8PagedCache(model.config)
    for keywords in ({}, {"deterministic": True}, {"dtype": "adaptive"}):
        with pytest.raises(ConfigError, match="can use this cache"):
            enable(model, **keywords)


@pytest.mark.parametrize("name", dict.fromkeys(["past_key_values", CACHE]))
def test_either_name_of_the_cache(name: str) -> None:
    """Model code from the Hub uses the name from before transformers 5.24. No call warns."""
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    kind = type(model)

    def old(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **{CACHE: past_key_values}, **kwargs)

    def new(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **{CACHE: cache}, **kwargs)

    forward = old if name == "past_key_values" else new
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    texts = torch.randint(4, 90, (4, 24)).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_model(model).path == "fused"
        scales = calibrate(model, texts, max_length=24, held_out=24, progress=False)
        assert len(scales.report.quality) > 1
        enable(model, training="stored")
        if name == CACHE:
            out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
            assert isinstance(out[CACHE], FP8PagedCache)
