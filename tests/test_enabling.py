"""Tests that a model has one storage plan: of `enable`, of `serving.enable`, and of its caches.

There are also tests of `summary` and of messages.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, PreTrainedModel

from hf_fp8kv import (
    ConfigError,
    FP8PagedCache,
    KVScales,
    LayerPlan,
    PrefixStore,
    choose_plan,
    disable,
    enable,
    serving,
    summary,
)
from hf_fp8kv.modeling.model_support import CACHE
from hf_fp8kv.serving.fp8_manager import find_factory
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import Inputs, build_variant

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
PLAIN = "K fp8_e3m4, V fp8_e3m4"
# A plan is chosen for these models.
CHOSEN = {
    # A plan of this model has centers, because it is chosen at several positions.
    "llama": {"max_position_embeddings": 8192},
    "gptj": {},
    "mixtral": {},
    "qwen3_moe": {},
    "sliding_and_full": {},
    "latent": {},
    "hybrid": {},
    "vision": {},
    "no special tokens": {"bos_token_id": None, "pad_token_id": None},
}
# No plan is chosen for these models, and the reason is logged.
UNCHOSEN = ("speech", "meta", "NaN")


def build_model(name: str, seed: int = 0, **fields: Any) -> tuple[PreTrainedModel, Inputs]:
    """Return a tiny model, and a prompt without padding."""
    variants = {"no special tokens": "llama", "meta": "llama", "NaN": "llama"}
    config_fields = {**CHOSEN.get(name, {}), **fields}
    model, padded_inputs = build_variant(variants.get(name, name), seed, **config_fields)
    inputs = {name: tensor[1:] for name, tensor in padded_inputs.items()}
    if name == "meta":
        model.to("meta")
    if name == "NaN":
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.fill_(torch.nan)
    return model, inputs


@pytest.fixture
def llama() -> tuple[PreTrainedModel, Inputs]:
    return build_model("llama")


@pytest.fixture
def model(llama: tuple[PreTrainedModel, Inputs]) -> PreTrainedModel:
    return llama[0]


@pytest.fixture
def inputs(llama: tuple[PreTrainedModel, Inputs]) -> Inputs:
    return llama[1]


def generate_and_get_cache(model: Any, inputs: Any, **keywords: Any) -> Any:
    """Return the cache with which `generate()` calls the model."""
    caches: list[Any] = []
    inner_model = getattr(model, "_orig_mod", model)
    hook = inner_model.register_forward_hook(lambda *arguments: caches.append(arguments[-1][CACHE]))
    model.generate(**inputs, **{**GREEDY, **keywords})
    hook.remove()
    return caches[-1]


def read_digest(cache: Any) -> str | None:
    return getattr(cache.options.scales, "digest", None)


def generate_digest(model: Any, inputs: Inputs) -> str | None:
    return read_digest(generate_and_get_cache(model, inputs))


def get_serving_digest(model: Any, **keywords: Any) -> str | None:
    factory = find_factory(serving.enable(model, probe=False, **keywords))
    assert factory is not None
    return read_digest(factory.config)


@pytest.mark.parametrize("name", [*CHOSEN, *UNCHOSEN])
def test_enable_has_a_plan_or_logs_why_not(name: str, caplog: Any) -> None:
    model, inputs = build_model(name)
    with caplog.at_level("WARNING", "hf_fp8kv"):
        enable(model)
    records = [record for record in caplog.records if record.name.startswith("hf_fp8kv")]
    assert len(records) == (1 if name in UNCHOSEN else 0), records
    if name != "meta":
        caches = generate_and_get_cache(model, inputs)
        cache = getattr(caches, "self_attention_cache", caches)
        assert (read_digest(cache) is None) == (name in UNCHOSEN)
        if name in UNCHOSEN:
            assert set(cache.memory_footprint().layers_by_plan) == {PLAIN}
    disable(model)
    if name in UNCHOSEN:
        with pytest.raises((ConfigError, NotImplementedError)):
            enable(model, dtype="adaptive")


# In the fast tier, a test of training calls compiled code after each `enable`.
@pytest.mark.filterwarnings("ignore")  # torch.compile's imports warn
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_called", [False, pytest.param(True, marks=pytest.mark.full)])
@torch.no_grad()
def test_a_compiled_model_is_enabled(is_called: bool) -> None:
    model, inputs = build_model("llama", num_hidden_layers=1)
    compiled: Any = torch.compile(model, backend="eager")
    assert enable(compiled, training="stored") is compiled
    # A growing cache would break the graph in each layer.
    cache = FP8PagedCache(compiled, prefill="stored", max_cache_len=64)
    assert generate_digest(compiled, inputs) == read_digest(cache) == choose_plan(compiled).digest
    if is_called:
        expected = model(**inputs).logits
        assert_same(compiled(**inputs).logits, expected)
        assert_same(compiled(**inputs, **{CACHE: cache}).logits, expected)


def test_a_cache_of_an_unsupported_wrapper_or_value_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model: .*Pass the model inside it"):
        FP8PagedCache(torch.nn.DataParallel(model))
    for value in ("some/model", type(model), 3):
        with pytest.raises(ConfigError, match=r"^config: expected a model, its config or None"):
            FP8PagedCache(value)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dtype": "model"}, {"dtype": "fp8_e3m4"}, {"key_dtype": "model"}, {"value_dtype": "fp8"},
        {"plan": "fp8_e3m4"}, {"plan": LayerPlan.parse("int8 rotated", "model")},
        {"scales": 1.0}, {"scales": KVScales.uniform(2)},
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_that_says_how_to_store_does_not_call_the_model(
    model: Any, inputs: Inputs, keywords: dict[str, Any]
) -> None:
    hook = model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    enable(model, **keywords)
    plan = FP8PagedCache(model, **keywords).plan
    assert get_serving_digest(model, **keywords) == read_digest(
        FP8PagedCache(model.config, **keywords)
    )
    hook.remove()
    assert plan == FP8PagedCache(model.config, **keywords).plan
    assert generate_and_get_cache(model, inputs).plan == plan


def test_arguments_that_do_not_say_how_to_store_keep_the_plan(
    model: Any, inputs: Inputs, tmp_path: Path
) -> None:
    digest = choose_plan(model).digest
    other_arguments: list[dict[str, Any]] = [
        {"page_size": 16}, {"max_cache_len": 64}, {"max_pages": 64}, {"skip_layers": [1]},
        {"prefill": "stored"}, {"backend": "torch"}, {"offloading": True}, {"dtype": "adaptive"},
        {"prefix_store": PrefixStore(tmp_path)}, {"deterministic": True}, {"training": "stored"},
        {"reuse_prefix": False},
    ]  # fmt: skip
    for keywords in other_arguments:
        enable(model, **keywords)
        cache = generate_and_get_cache(model, inputs, disable_compile=True)
        assert read_digest(cache) == digest, keywords
        assert set(cache.plan) == ({0} if "skip_layers" in keywords else {0, 1})
    enable(model)
    cache = generate_and_get_cache(model, inputs, cache_implementation="offloaded")
    assert read_digest(cache) == digest
    assert cache.options.offloading


def test_bits_apply_to_generate_and_engines(model: Any, inputs: Inputs) -> None:
    enable(model, bits=6)
    cache = generate_and_get_cache(model, inputs)
    assert {side.format for layer in cache.plan.values() for side in layer} == {"int6"}
    for bits in (6, None):  # without bits, the frozen plan
        assert get_serving_digest(model, bits=bits) == read_digest(cache)
        assert read_digest(FP8PagedCache(model, bits=bits)) == read_digest(cache)
    assert get_serving_digest(model, bits=8) != read_digest(cache)
    assert FP8PagedCache(model, plan="int8").plan != cache.plan
    for make in (enable, FP8PagedCache):
        with pytest.raises(ConfigError, match="plan: expected None with bits=6, got 'int8'"):
            make(model, bits=6, plan="int8")
    for config in (model.config, None):
        with pytest.raises(ConfigError, match="bits: expected 8 for a config"):
            FP8PagedCache(config, bits=6)
    assert read_digest(generate_and_get_cache(model, inputs)) == read_digest(cache)
    assert generate_digest(enable(model), inputs) == choose_plan(model).digest


def test_the_plan_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_model("llama", seed=7)  # without a plan in a file
    digest = read_digest(FP8PagedCache(model))
    assert digest
    # The weights are not read again.
    monkeypatch.setattr("hf_fp8kv.utils.digests._compute_checksums", None)
    enable(model)
    enable(model, page_size=16)
    disable(model)
    enable(model, training="stored")  # runs the model on three tokens
    hook = model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    digests = {read_digest(FP8PagedCache(model, prefill="stored")), get_serving_digest(model)}
    hook.remove()
    assert {generate_digest(model, inputs), *digests} == {digest}


def test_enable_keeps_the_plan_while_the_weights_change(model: Any, inputs: Inputs) -> None:
    enable(model, training="stored")
    digest = generate_digest(model, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model.train()
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    optimizer.step()
    model.eval()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: generate_digest(model, inputs),
        lambda: get_serving_digest(model),
        lambda: read_digest(FP8PagedCache(model)),
        lambda: generate_digest(enable(model, training="stored", page_size=16), inputs),
        lambda: generate_digest(copy.deepcopy(model), inputs),
        lambda: generate_digest(pickle.loads(pickle.dumps(model)), inputs),
    )
    for call in calls:
        assert call() == digest
    disable(model)
    new_digest = choose_plan(model).digest
    assert new_digest != digest
    assert read_digest(FP8PagedCache(model)) == new_digest
    assert generate_digest(enable(model), inputs) == new_digest
    # An explicit format ends the frozen plan as well.
    enable(model, dtype="model")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-2)
    assert get_serving_digest(model) == choose_plan(model).digest != new_digest


def test_a_cache_of_a_model_equals_a_cache_with_its_plan(
    model: Any, inputs: Inputs, tmp_path: Path
) -> None:
    plan = choose_plan(model)
    cache = FP8PagedCache(model, page_size=8)
    expected = FP8PagedCache(model.config, plan=plan, page_size=8)
    model.set_attn_implementation("fp8_paged")
    tokens = model.generate(**inputs, **GREEDY, past_key_values=cache)
    assert_same(model.generate(**inputs, **GREEDY, past_key_values=expected), tokens)
    # tests/cache/test_machine.py compares the contents of copies.
    copies = [
        copy.copy(cache), copy.deepcopy(cache), cache.fork(), pickle.loads(pickle.dumps(cache)),
        FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors")),
    ]  # fmt: skip
    for copied_cache in copies:
        assert copied_cache.plan == cache.plan == expected.plan
        assert read_digest(copied_cache) == plan.digest


def test_a_cache_does_not_keep_its_model() -> None:
    model, inputs = build_model("llama")  # a fixture would keep the model
    cache = FP8PagedCache(model)
    reference = weakref.ref(model)
    generate_and_get_cache(model, inputs, past_key_values=cache)
    fork = cache.fork()
    del model
    gc.collect()
    assert reference() is None
    assert pickle.loads(pickle.dumps(fork)).plan == cache.plan


@pytest.mark.parametrize("name", ["cross_attention", "position_bias", "speech"])
def test_cross_attention_stays_plain(name: str) -> None:
    model, inputs = build_model(name)
    enable(model)
    caches = generate_and_get_cache(model, inputs)
    assert isinstance(caches, EncoderDecoderCache)
    assert set(caches.cross_attention_cache.memory_footprint().layers_by_plan) == {PLAIN}
    cache = FP8PagedCache(model)
    assert cache.plan == caches.self_attention_cache.plan
    disable(model)
    pair = EncoderDecoderCache(cache, FP8PagedCache(model.config, dtype="fp8_e3m4"))
    assert generate_and_get_cache(model, inputs, past_key_values=pair) is pair
    assert cache.host_length()


@pytest.mark.parametrize(
    "name",
    [
        "git", "gpt_neo", "seq2seq/fsmt", "seq2seq/led", "seq2seq/nllb-moe", "moshi",
        pytest.param("prophetnet", marks=pytest.mark.full),
        pytest.param("cpmant", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_models_that_treat_empty_positions_as_tokens_cannot_preallocate(name: str) -> None:
    model, inputs = build_variant(name)
    attention = model.config._attn_implementation
    model.__class__ = type("Renamed", (type(model),), {})
    with pytest.raises(
        ConfigError, match=r"max_cache_len: expected .* got Renamed, which (has|rai)"
    ):
        enable(model, dtype="model", max_cache_len=64)
    assert model.config._attn_implementation == attention
    assert "_prepare_cache_for_generation" not in vars(model)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(enable(model, dtype="model").generate(**inputs, **GREEDY), expected)


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_a_summary_has_the_memory_of_the_last_generate(
    model: Any, inputs: Inputs, keeps_cache: bool
) -> None:
    with pytest.raises(ConfigError, match="expected an enabled model, got LlamaForCausalLM"):
        summary(model)
    enable(model, dtype="fp8", page_size=8)
    assert summary(model).footprint is None
    assert str(summary(model)).startswith("no generate() with 8-bit pages yet")
    generated = model.generate(**inputs, **GREEDY, return_dict_in_generate=keeps_cache)
    model_summary = summary(model)
    num_tokens = inputs["input_ids"].shape[1] + GREEDY["max_new_tokens"] - 1
    assert model_summary.footprint.tokens == num_tokens
    assert model_summary.footprint.used_bytes == -(-num_tokens // 8) * 8 * 144
    assert model_summary.stored_bytes == num_tokens * 144
    assert model_summary.bf16_bytes == num_tokens * 256
    assert model_summary.report.counts == {"fused": 2}
    assert model_summary.captured == "not on this device"
    assert f"{num_tokens} tokens in {num_tokens * 144:,} bytes" in str(model_summary)
    assert f"pages of {model_summary.footprint.used_bytes:,} bytes" in str(model_summary)
    del generated
    assert summary(model) == model_summary
    assert summary(copy.deepcopy(model)).footprint is None
    model.generate(**inputs, **GREEDY, cache_implementation="static", disable_compile=True)
    assert summary(model).footprint is None


def test_a_summary_counts_windows_and_layers_of_transformers() -> None:
    model, inputs = build_model("sliding_and_full")
    enable(model, dtype="fp8", page_size=8)
    model.generate(**inputs, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    num_tokens = inputs["input_ids"].shape[1] + 40 - 1  # the last token is never stored
    num_stored = num_tokens + min(model.config.sliding_window, num_tokens)
    assert summary(model).stored_bytes == num_stored * 72
    assert summary(model).bf16_bytes == num_stored * 128
    model, inputs = build_model("hybrid")
    enable(model)
    model.generate(**inputs, **GREEDY)
    assert "stock (layer 0" in str(summary(model))


def test_a_stock_cache_warns_that_nothing_is_stored_in_8_bits(
    model: Any, inputs: Inputs, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8kv.utils.warn_once._logged_messages", set())
    model.set_attn_implementation("fp8_paged")
    model.generate(**inputs, **GREEDY, **{CACHE: FP8PagedCache(model)})
    model(**inputs, use_cache=False)
    assert not caplog.messages
    model.generate(**inputs, **GREEDY)
    model.generate(**inputs, **GREEDY)
    (message,) = caplog.messages
    assert "stores nothing in 8 bits. After hf_fp8kv.enable(model)" in message


@pytest.mark.parametrize("enable_model", [enable, serving.enable])
def test_a_path_as_prefix_store_is_refused_before_a_plan_is_chosen(
    model: Any, enable_model: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"expected an hf_fp8kv\.PrefixStore"):
        enable_model(model, prefix_store="folder")
    assert not caplog.messages


def test_a_dtype_may_be_positional_and_a_wrong_keyword_gets_a_suggestion(
    model: Any, inputs: Inputs
) -> None:
    model.generate(**enable(model, "fp8") and inputs, **GREEDY)
    assert summary(model).footprint.layers_by_plan == {"K fp8_e4m3, V fp8_e4m3": 2}
    with pytest.raises(ConfigError, match=r"enable: expected .*Did you mean 'page_size'\?"):
        enable(model, page_sise=32)
    with pytest.raises(ConfigError, match=r"enable: expected .*Did you mean 'deterministic'\?"):
        enable(model, determinstic=True)
    with pytest.raises(ConfigError, match=r"serving.enable: expected .* got max_pages. Set pages"):
        serving.enable(model, max_pages=3)
    with pytest.raises(ConfigError, match=r"Did you mean 'scales'\?"):
        serving.enable(model, scale=1.0)


def test_rollouts_and_the_trainer_store_the_same_bytes_after_a_step(
    model: Any, inputs: Inputs
) -> None:
    serving.enable(model, probe=False)
    enable(model, training="stored")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    for _ in range(2):
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        optimizer.step()
        with torch.no_grad():
            expected = model(**inputs, **{CACHE: FP8PagedCache(model, prefill="stored")}).logits
            torch.testing.assert_close(model(**inputs, use_cache=False).logits, expected)
