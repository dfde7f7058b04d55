"""Tests of `enable(model, training="stored")`: a training pass reproduces a rollout."""

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
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.modeling.exact_states import ROUNDING_NOTE
from hf_fp8kv.reproducible.training import StoredRounding
from tests.helpers.grids import pairwise
from tests.helpers.tiny_models import build_variant

Tensor = torch.Tensor
PAGE_SIZE = 16
NUM_TOKENS = 19
CHUNK_SIZES = [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, NUM_TOKENS]


def make_scales(
    num_layers: int = 2, num_heads: int = 2, dim: int = 16, *, has_center: bool
) -> KVScales:
    """Return scales that differ by layer, head and side. Some values of K and V saturate."""
    generator = torch.Generator().manual_seed(5)

    def make_layer() -> LayerScales:
        k, v = (torch.rand(num_heads, 1, generator=generator) * 2e-3 + 3e-3 for _ in range(2))
        k_center = torch.randn(num_heads, dim, generator=generator) / 4 if has_center else None
        return LayerScales(k, v / 3, k_center)

    return KVScales({index: make_layer() for index in range(num_layers)})


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("gqa", {}),
    "static, centers": ("gqa", {"scales": make_scales(has_center=True)}),
    "static e5m2": ("gqa", {"scales": make_scales(has_center=False), "dtype": "fp8_e5m2"}),
    "constant": ("gqa", {"scales": 0.01}),
    "int8": ("gqa", {"dtype": "int8"}),
    "K auto": ("gqa", {"key_dtype": "auto", "dtype": "fp8_e4m3"}),
    "V auto": ("gqa", {"value_dtype": "auto", "key_dtype": "fp8_e2m5"}),
    "skipped": ("gqa", {"skip_layers": [1]}),
    "mha": ("mha", {"dtype": "fp8_e4m3"}),
    "window": ("sliding", {"dtype": "fp8_e4m3"}),
    "windows skipped": ("sliding_and_full", {"skip_layers": ["sliding_attention"]}),
}


def make_texts(is_padded: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(3, 90, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if is_padded:
        mask[0, :3] = mask[1, -2:] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def select_log_probs(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.log_softmax(-1)[mask.bool()]


@torch.no_grad()
def score_in_chunks(model: Any, chunk_size: int, is_padded: bool = True, **options: Any) -> Tensor:
    ids, mask, positions = make_texts(is_padded)
    cache = FP8PagedCache(model, prefill="stored", page_size=PAGE_SIZE, **options)
    logits = []
    for start in range(0, NUM_TOKENS, chunk_size):
        stop = start + chunk_size
        output = model(
            ids[:, start:stop], attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop], past_key_values=cache,
        )  # fmt: skip
        logits.append(output.logits)
    return select_log_probs(torch.cat(logits, 1), mask)


def score_texts(model: Any, is_padded: bool = True, **options: Any) -> Tensor:
    ids, mask, positions = make_texts(is_padded)
    options = {"use_cache": False, **options}
    logits = model(ids, attention_mask=mask, position_ids=positions, **options).logits
    return select_log_probs(logits, mask)


def assert_near(actual: Tensor, expected: Tensor, unrounded: Tensor) -> None:
    """Assert that the error of `actual` is less than a tenth of the error of `unrounded`.

    On a CPU, one value may be rounded differently at a tie, which changes the result
    far less than rounding all values does.
    """
    error, unrounded_error = (
        (result - expected).abs().mean().item() for result in (actual, unrounded)
    )
    assert error < unrounded_error / 10
    assert unrounded_error > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_one_pass_matches_rollouts_with_all_chunk_sizes(case: str) -> None:
    """`deterministic` makes results bitwise equal. Otherwise the last bit may change a code."""
    name, options = CASES[case]
    model, _ = build_variant(name, attn_implementation="fp8_paged")
    unrounded = score_texts(model)
    enable(model, training="stored", page_size=PAGE_SIZE, **options)
    actual = score_texts(model.train())
    model.eval()
    for chunk_size in (1, PAGE_SIZE + 1):
        assert_near(actual, score_in_chunks(model, chunk_size, **options), unrounded)
    if "skip_layers" not in options:
        enable(model, training="stored", deterministic=True, page_size=PAGE_SIZE, **options)
        actual = score_texts(model.train(), is_padded=False)
        model.eval()
        for chunk_size in CHUNK_SIZES:
            expected = score_in_chunks(model, chunk_size, is_padded=False, **options)
            assert torch.equal(actual, expected), chunk_size
    assert torch.equal(score_texts(disable(model)), unrounded)


# All pairs of a format, a kind of scales and a dtype of the model.
@pytest.mark.parametrize(
    ("format_name", "kind", "dtype"),
    pairwise(list(FORMATS), ["dynamic", "static"], [torch.float32, torch.bfloat16]),
)
def test_the_rounding_matches_a_cache(format_name: str, kind: str, dtype: torch.dtype) -> None:
    """The default backend rounds like a cache with the backend "reference"."""
    scales = make_scales(has_center=True) if kind == "static" else None
    options = {"prefill": "stored", "dtype": format_name, "scales": scales, "page_size": PAGE_SIZE}
    states = torch.randn(2, 2, 2, NUM_TOKENS, 16).to(dtype)
    rounding = StoredRounding(FP8PagedCache(**options).options, 1, *states)
    handles = FP8PagedCache(**options, backend="reference").update(*states, 1)
    rounded_states = rounding.read(rounding.store(*states), *states)
    for exact, handle, rounded in zip(states, handles, rounded_states, strict=True):
        assert rounded.dtype == dtype
        assert torch.equal(rounded, handle.dense().to(dtype))
        assert not torch.equal(rounded, exact)


@torch.no_grad()
def test_packed_texts_match_separate_texts() -> None:
    model, _ = build_variant("sliding_and_full", attn_implementation="fp8_paged")
    ids = make_texts()[0][:1]
    positions = torch.cat([torch.arange(11), torch.arange(8)])[None]
    unrounded = model(ids, position_ids=positions).logits[0]
    enable(model, training="stored", dtype="fp8_e4m3")
    packed_logits = model(ids, position_ids=positions, use_cache=False).logits[0]
    separate_logits = [model(part, use_cache=False).logits[0] for part in ids.split([11, 8], 1)]
    for other_logits in (model(ids, use_cache=False).logits[0], unrounded):
        assert_near(packed_logits, torch.cat(separate_logits), other_logits)


@pytest.mark.parametrize("name", ["kv_sharing", "kv_sharing_unscaled", "hybrid", "sinks"])
@torch.no_grad()
def test_layers_may_share_keys_or_have_no_pages(name: str) -> None:
    """A layer that reads the keys of an earlier layer rounds with the scales of that layer."""
    model, inputs = build_variant(name, attn_implementation="fp8_paged")
    indices = [layer.index for layer in FP8PagedCache(model.config).paged_layers]
    scales = KVScales({
        index: LayerScales(torch.tensor(0.004 / (index + 1)), torch.tensor(0.002 * (index + 1)))
        for index in indices
    })  # fmt: skip
    unrounded = model(**inputs, use_cache=False).logits
    enable(model, training="stored", scales=scales)
    actual = model(**inputs, use_cache=False).logits
    cache = FP8PagedCache(model.config, scales=scales, prefill="stored")
    expected = model(**inputs, past_key_values=cache).logits
    mask = inputs["attention_mask"]
    assert_near(*(select_log_probs(logits, mask) for logits in (actual, expected, unrounded)))


def test_rounding_can_be_suspended_and_disabled() -> None:
    """Calibration and the probe of `serving.enable` suspend rounding. `enable` replaces it.

    Copies of the model round independently.
    """
    model, _ = build_variant("gqa", attn_implementation="fp8_paged")
    unrounded = score_texts(model)
    enable(model, training="stored", dtype="fp8_e5m2")
    rounded_log_probs = score_texts(model)
    assert not torch.equal(rounded_log_probs, unrounded)
    with eval_mode(model):
        assert torch.equal(score_texts(model), unrounded)
    serving.enable(model, dtype="fp8_e5m2")
    serving.disable(model)
    assert torch.equal(score_texts(model), rounded_log_probs)
    for options in ({"training": "stored", "dtype": "auto"}, {"dtype": "fp8_e5m2"}):
        enable(model, training="stored", dtype="fp8_e5m2")
        enable(model, **options)
        assert torch.equal(score_texts(model), unrounded)
    enable(model, training="stored", scales=make_scales(has_center=True))
    rounded_log_probs = score_texts(model)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    disable(model)
    for model_copy in copies:
        assert torch.equal(score_texts(model_copy), rounded_log_probs)
        assert torch.equal(score_texts(disable(model_copy)), unrounded)


REFUSED_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown mode": ("gqa", {"training": "exact"}, "training: expected None or 'stored'"),
    "exact prefill": ("gqa", {"prefill": "exact"}, "expected prefill='stored', got 'exact'"),
    "encoder-decoder": ("cross_attention", {}, "which is an encoder-decoder"),
    "separate attention code": ("alibi", {}, "its own attention code"),
    "latent": ("latent", {}, r"got layers \[0, 1\] of DeepseekV3ForCausalLM"),
    "scales of other heads": (
        "gqa",
        {"scales": make_scales(num_heads=3, has_center=False)},
        "expected 2 heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED_CASES)
def test_unsupported_training_options_are_refused(case: str) -> None:
    name, options, message = REFUSED_CASES[case]
    model, inputs = build_variant(name)
    cache = FP8PagedCache(model)  # the model keeps its plan
    if name == "latent":  # the modules have used a cache before
        model.set_attn_implementation("fp8_paged")
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2, pad_token_id=0)
    attributes = set(vars(model))
    attention = model.config._attn_implementation
    with pytest.raises((ConfigError, ScaleError), match=message):
        enable(model, **{"training": "stored", **options})
    assert model.config._attn_implementation == attention
    assert set(vars(model)) == attributes


def test_a_model_that_rounds_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors rounds K and V in calls without a cache, before this package would."""
    model, _ = build_variant("gqa")
    monkeypatch.setattr("hf_fp8kv.reproducible.training.describe_rounding", lambda _: ROUNDING_NOTE)
    with pytest.raises(ConfigError, match="already rounds K and V in calls without a cache"):
        enable(model, training="stored")


def test_a_model_that_cannot_run_is_refused() -> None:
    model, _ = build_variant("gqa", attn_implementation="sdpa")
    vars(model)["forward"] = None
    with pytest.raises(ConfigError, match="expected a model that can be run on three tokens"):
        enable(model, training="stored")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_follows_each_enable() -> None:
    """Compiled code notices that its modules round, and that they no longer round."""
    model, inputs = build_variant("gqa")
    ids = inputs["input_ids"]
    compiled = torch.compile(model, backend="eager")
    for training in ("stored", None, "stored", None):
        enable(model, dtype="int6", training=training)
        with torch.no_grad():
            assert torch.equal(
                compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits
            )
