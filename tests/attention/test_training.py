"""`enable(model, training="stored")`: one pass over a text gives the probabilities of a rollout."""

import copy
import pickle
from typing import Any

import pytest
import torch

from hf_fp8kv import (
    ConfigError,
    FP8PagedCache,
    KVScales,
    LayerScales,
    ScaleError,
    disable,
    enable,
    serving,
)
from hf_fp8kv.attention.switching import eval_mode
from hf_fp8kv.attention.training import StoredRounding
from hf_fp8kv.formats import FORMATS, LayerPlan
from hf_fp8kv.modeling.exact_states import NOTE
from tests.helpers.grids import pairwise
from tests.helpers.tiny_models import tiny

Tensor = torch.Tensor
PAGE, TOKENS = 16, 19
CHUNKS = [1, PAGE - 1, PAGE, PAGE + 1, TOKENS]


def static_scales(layers: int = 2, heads: int = 2, dim: int = 16, *, center: bool) -> KVScales:
    """Return scales that differ by layer, head and side. Some values saturate."""
    generator = torch.Generator().manual_seed(5)

    def layer() -> LayerScales:
        k, v = (torch.rand(heads, 1, generator=generator) * 2e-3 + 3e-3 for _ in range(2))
        k_center = torch.randn(heads, dim, generator=generator) / 4 if center else None
        return LayerScales(k, v / 3, k_center)

    return KVScales({index: layer() for index in range(layers)})


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("gqa", {}),
    "static, centers": ("gqa", {"scales": static_scales(center=True)}),
    "static e5m2": ("gqa", {"scales": static_scales(center=False), "dtype": "fp8_e5m2"}),
    "constant": ("gqa", {"scales": 0.01}),
    "int8": ("gqa", {"dtype": "int8"}),
    "K auto": ("gqa", {"key_dtype": "auto", "dtype": "fp8_e4m3"}),
    "V auto": ("gqa", {"value_dtype": "auto", "key_dtype": "fp8_e2m5"}),
    "skipped": ("gqa", {"skip_layers": [1]}),
    "mha": ("mha", {"dtype": "fp8_e4m3"}),
    "window": ("sliding", {"dtype": "fp8_e4m3"}),
    "windows skipped": ("sliding_and_full", {"skip_layers": ["sliding_attention"]}),
}


def texts(padded: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and positions of two texts, which may be padded on both sides."""
    ids = torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = mask[1, -2:] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def log_probs(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.log_softmax(-1)[mask.bool()]


@torch.no_grad()
def roll_out(model: Any, chunk: int, padded: bool = True, **keywords: Any) -> Tensor:
    """Return the log-probabilities that a generation computes from pages, in chunks of tokens."""
    ids, mask, positions = texts(padded)
    cache = FP8PagedCache(model.config, prefill="stored", page_size=PAGE, **keywords)
    parts = []
    for start in range(0, TOKENS, chunk):
        part = slice(start, start + chunk)
        prefix_mask = mask[:, : start + chunk]
        out = model(
            ids[:, part],
            attention_mask=prefix_mask,
            position_ids=positions[:, part],
            past_key_values=cache,
        )
        parts.append(out.logits)
    return log_probs(torch.cat(parts, 1), mask)


def teach(model: Any, padded: bool = True, **keywords: Any) -> Tensor:
    """Return the log-probabilities of one pass over the complete texts."""
    ids, mask, positions = texts(padded)
    out = model(
        ids, attention_mask=mask, position_ids=positions, **{"use_cache": False, **keywords}
    )
    return log_probs(out.logits, mask)


def assert_near(actual: Tensor, expected: Tensor, unrounded: Tensor) -> None:
    """Assert that `actual` is ten times nearer to `expected` than `unrounded` is.

    The CPU may move one value beyond a tie, which changes the results by far less.
    """
    error, unrounded_error = ((x - expected).abs().mean().item() for x in (actual, unrounded))
    assert error < unrounded_error / 10
    assert unrounded_error > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_one_pass_matches_rollouts_with_all_chunk_sizes(case: str) -> None:
    """The bits are equal with `deterministic`. Otherwise a last bit may decide a code."""
    name, keywords = CASES[case]
    model, _ = tiny(name, attn_implementation="fp8_paged")
    unrounded = teach(model)
    enable(model, training="stored", page_size=PAGE, **keywords)
    actual = teach(model.train())
    model.eval()
    for chunk in CHUNKS:
        assert_near(actual, roll_out(model, chunk, **keywords), unrounded)
    if "skip_layers" not in keywords:
        enable(model, training="stored", deterministic=True, page_size=PAGE, **keywords)
        actual = teach(model.train(), padded=False)
        model.eval()
        for chunk in CHUNKS:
            assert torch.equal(actual, roll_out(model, chunk, padded=False, **keywords)), chunk
    assert torch.equal(teach(disable(model)), unrounded)


def test_a_deep_model_matches_a_rollout_of_one_text() -> None:
    """Products of few rows round differently, as in decoding token by token."""
    tokens = 4 * 16 + 1
    model, _ = tiny("gqa", attn_implementation="fp8_paged", num_hidden_layers=16)
    ids = torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(6))
    enable(model, training="stored", deterministic=True, dtype="fp8")
    actual = model.train()(ids, use_cache=False).logits
    assert actual.requires_grad
    model.eval()
    for chunk in (1, 16):
        cache = FP8PagedCache(model.config, dtype="fp8", prefill="stored")
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split(chunk, 1)]
        assert torch.equal(torch.cat(parts, 1), actual)
    assert torch.equal(model(ids[:, :-1], use_cache=False).logits, actual[:, :-1])
    assert (disable(model)(ids).logits - actual).abs().max() > 1e-2


def test_one_pass_gives_the_probabilities_of_generated_tokens() -> None:
    """A trainer replays the probabilities that `generate()` samples from, with padded prompts."""
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    enable(model, training="stored", dtype="fp8_e4m3", page_size=PAGE)
    out = model.generate(
        **inputs, max_new_tokens=12, do_sample=True, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert isinstance(out.past_key_values, FP8PagedCache)
    prompt = inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 12, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.train()
    actual, unrounded = (
        each(out.sequences, attention_mask=mask, position_ids=positions).logits[:, prompt - 1 : -1]
        for each in (model, tiny("gqa")[0])
    )
    sampled = torch.stack(out.logits, 1).log_softmax(-1)
    assert_near(actual.log_softmax(-1), sampled, unrounded.log_softmax(-1))


# Grid: All pairs of a format, a kind of scales and a dtype of the model.
@pytest.mark.parametrize(
    ("name", "scaled", "dtype"),
    pairwise(list(FORMATS), ["dynamic", "static"], [torch.float32, torch.bfloat16]),
)
def test_the_rounding_matches_a_cache(name: str, scaled: str, dtype: torch.dtype) -> None:
    """The default backend rounds as a cache with the backend "reference"."""
    scales = static_scales(center=True) if scaled == "static" else None
    keywords = {"prefill": "stored", "dtype": name, "scales": scales, "page_size": PAGE}
    cache = FP8PagedCache(**keywords, backend="reference")
    states = torch.randn(2, 2, 2, TOKENS, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    rounding = StoredRounding(FP8PagedCache(**keywords).options, 1, *states)
    rounded_states = rounding.read(rounding.store(*states), *states)
    for side, stored, rounded in zip(states, cache.update(*states, 1), rounded_states, strict=True):
        assert rounded.dtype == dtype
        assert torch.equal(rounded, stored.dense().to(dtype))
        assert not torch.equal(rounded, side)


@torch.no_grad()
def test_packed_texts_match_separate_texts() -> None:
    model, _ = tiny("sliding_and_full", attn_implementation="fp8_paged")
    enable(model, training="stored", dtype="fp8_e4m3")
    ids = texts()[0]
    positions = torch.cat([torch.arange(11), torch.arange(8)])[None]
    packed = model(ids[:1], position_ids=positions, use_cache=False).logits[0]
    separate = [model(part, use_cache=False).logits[0] for part in ids[:1].split([11, 8], 1)]
    whole = model(ids[:1], use_cache=False).logits[0]
    assert_near(packed, torch.cat(separate), whole)
    disable(model)
    assert_near(packed, torch.cat(separate), model(ids[:1], position_ids=positions).logits[0])


@pytest.mark.parametrize("name", ["kv_sharing", "kv_sharing_unscaled", "hybrid", "sinks"])
@torch.no_grad()
def test_layers_that_share_keys_and_unpaged_layers(name: str) -> None:
    """A layer that reads the keys of an earlier layer rounds them with that layer's scales."""
    model, inputs = tiny(name, attn_implementation="fp8_paged")
    scales = KVScales(
        {
            i: LayerScales(torch.tensor(0.004 / (i + 1)), torch.tensor(0.002 * (i + 1)))
            for i in (layer.index for layer in FP8PagedCache(model.config).paged_layers)
        }
    )
    unrounded = model(**inputs, use_cache=False).logits
    enable(model, training="stored", scales=scales)
    actual = model(**inputs, use_cache=False).logits
    cache = FP8PagedCache(model.config, scales=scales, prefill="stored")
    expected = model(**inputs, past_key_values=cache).logits
    mask = inputs["attention_mask"]
    assert_near(*(log_probs(logits, mask) for logits in (actual, expected, unrounded)))


def test_rounding_can_be_suspended_and_disabled() -> None:
    """Calibration and the probe of serving use unrounded values, and each `enable` replaces it.

    Copies of the model round independently.
    """
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    stock, _ = tiny("gqa", attn_implementation="sdpa")
    unrounded = teach(stock)
    enable(model, dtype="fp8_e5m2")
    assert torch.equal(teach(model), unrounded)
    enable(model, training="stored", dtype="fp8_e5m2")
    rounded = teach(model)
    assert not torch.equal(rounded, unrounded)
    with eval_mode(model):
        assert torch.equal(teach(model), unrounded)
    assert torch.equal(teach(model), rounded)
    serving.enable(model, dtype="fp8_e5m2")
    serving.disable(model)
    assert torch.equal(teach(model), rounded)
    for keywords in ({"training": "stored", "dtype": "auto"}, {"dtype": "fp8_e5m2"}):
        enable(model, training="stored", dtype="fp8_e5m2")
        enable(model, **keywords)
        assert torch.equal(teach(model), unrounded)
    enable(model, training="stored", scales=static_scales(center=True))
    rounded = teach(model)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (disable(model), *copies):
        assert torch.equal(teach(each), unrounded if each is model else rounded)
        assert torch.equal(teach(disable(each)), unrounded)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a mode": ("gqa", {"training": "exact"}, "training: expected None or 'stored'"),
    "exact": ("gqa", {"prefill": "exact"}, "expected prefill='stored', got 'exact'"),
    "centers": ("gqa", {"plan": "fp8 centered"}, "expected a plan that carries the centers"),
    "a plan": (
        "gqa",
        {"plan": LayerPlan.parse("int8 centered", "int8")},
        "expected a plan that carries the centers",
    ),
    "a pair": ("cross_attention", {}, "which is an encoder-decoder"),
    "own code": ("alibi", {}, "its own attention code"),
    "latent": ("latent", {}, r"got layers \[0, 1\] of DeepseekV3ForCausalLM"),
    "scales": ("gqa", {"scales": static_scales(heads=3, center=False)}, "expected 2 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_training_options_are_refused(case: str) -> None:
    name, keywords, message = REFUSED[case]
    model, _ = tiny(name)
    before = set(vars(model))
    attention = model.config._attn_implementation
    with pytest.raises((ConfigError, ScaleError), match=message):
        enable(model, **{"training": "stored", **keywords})
    assert model.config._attn_implementation == attention
    assert set(vars(model)) == before


def test_a_model_that_rounds_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors rounds K and V in calls without a cache, before this package would."""
    model, _ = tiny("gqa")
    monkeypatch.setattr("hf_fp8kv.attention.training.rounding_note", lambda _: NOTE)
    with pytest.raises(ConfigError, match="already rounds K and V in calls without a cache"):
        enable(model, training="stored")


def test_a_model_that_cannot_run_is_refused() -> None:
    model, _ = tiny("gqa", attn_implementation="sdpa")
    vars(model)["forward"] = None
    with pytest.raises(ConfigError, match="expected a model that can be run on three tokens"):
        enable(model, training="stored")
    assert model.config._attn_implementation == "sdpa"
