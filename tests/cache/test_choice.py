"""How a layer is stored, as its first call chooses: the choice, refused plans, kept plans."""

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fp8kv import ConfigError, FP8PagedCache, LayerPlan, SidePlan
from tests.cache.public import attend
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import causal_config, tiny

pytestmark = [pytest.mark.text, pytest.mark.usefixtures("no_gradients")]

SAFE = LayerPlan.parse("fp8_e3m4 centered", "fp8_e3m4")
HEADS, GROUPS, TOKENS, DIM = 2, 3, 300, 64
VALUES = [SidePlan.parse(name) for name in ("fp8_e3m4", "fp8_e2m5 rotated", "int8 rotated")]


def config(theta: float | None = None, positions: int = 32768, window: int | None = None) -> Any:
    """Return a config whose keys turn with RoPE of this base, or not at all."""
    sizes = {"num_attention_heads": HEADS * GROUPS, "num_key_value_heads": HEADS, "head_dim": DIM}
    sizes.update(hidden_size=HEADS * GROUPS * DIM, max_position_embeddings=positions)
    if window is not None:
        sizes["sliding_window"] = window
    found = causal_config("llama" if window is None else "mistral", **sizes)
    rope = {"rope_type": "default", "rope_theta": theta}
    found.rope_parameters = None if theta is None else rope
    return found


def states(outlier: float = 1.0, bias: float = 0.0, count: int = TOKENS) -> list[torch.Tensor]:
    """Return Q, K and V; a pair of channels of one head is larger in K and smaller in Q."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, count, DIM, generator=generator)
        for heads in (HEADS * GROUPS, HEADS, HEADS)
    )
    k = k + bias * torch.randn(HEADS, 1, DIM, generator=generator)
    for channel in (5, 5 + DIM // 2):
        k[:, 0, :, channel] *= outlier
        q[:, :GROUPS, :, channel] /= outlier
    return [q, k, v]


def store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scaling: float = DIM**-0.5,
    of: Any = None, **keywords: Any,
) -> FP8PagedCache:  # fmt: skip
    """Return a cache after its first call and the attention to it."""
    cache = FP8PagedCache(of or config(), page_size=8, **keywords)
    attend(q, *cache.update(k, v, 0), scaling)
    return cache


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> LayerPlan:
    return store(q, k, v, **keywords).plan[0]


def test_gaussian_values_are_rotated_outliers_of_one_head_are_not() -> None:
    plan = choose(*states())
    assert plan.k.rotated
    assert plan.k.format in ("int8", "fp8_e2m5")
    assert plan.v.format in ("int8", "fp8_e2m5")
    other = choose(*states(outlier=50.0))
    assert not other.k.rotated
    assert other.k.format == "fp8_e3m4"
    assert other.v == plan.v


def test_a_bias_is_centered_unless_it_turns_with_the_position() -> None:
    """The center of the first positions does not remove the bias at later positions."""
    still, turned = (choose(*states(bias=20.0), of=config(theta)) for theta in (None, 1.0))
    assert still.k.centered
    assert turned.k != still.k
    # A model without later positions does not meet them.
    assert choose(*states(bias=20.0), of=config(1.0, positions=1000)).v == still.v


def test_keys_are_not_rotated_if_it_is_not_known_how_they_turn() -> None:
    known, unknown = choose(*states()), FP8PagedCache(page_size=8)
    q, k, v = states()
    attend(q, *unknown.update(k, v, 0), DIM**-0.5)
    assert known.k.rotated
    assert not unknown.plan[0].k.rotated
    assert unknown.plan[0].v == known.v
    # A format that a user names is rotated in any case.
    by_name = FP8PagedCache(page_size=8, dtype="int8")
    attend(q, *by_name.update(k, v, 0), DIM**-0.5)
    assert by_name.plan[0].k.rotated


@pytest.mark.parametrize("heads", [[0], [0, 1]])
@pytest.mark.parametrize("outlier", [1, 12, 20, 24, 50])
def test_a_plan_has_to_cost_less_than_half_in_every_head(heads: list[int], outlier: float) -> None:
    """The cost of a plan for V: squared errors of the output with the values that it reads back."""
    q, k, v = states(count=200)
    v[:, heads, :, 5] *= outlier
    hidden = torch.ones(200, 200).triu(1).bool()
    logits = (q @ k.repeat_interleave(GROUPS, 1).mT) * DIM**-0.5
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)[:, :, 50:]
    costs = []
    for side in VALUES:
        stored = store(q, k, v, plan=LayerPlan(SidePlan.parse("fp8_e3m4"), side))
        error = stored.layers[0].values.dense() - v
        moved = weights @ error.repeat_interleave(GROUPS, 1)
        costs.append(moved.square().sum((0, 2, 3)).view(HEADS, GROUPS).sum(1))
    better = [i for i, cost in enumerate(costs) if (cost <= costs[0] / 2).all()]
    expected = min(better, key=lambda i: float(costs[i].sum()), default=0)
    assert choose(q, k, v).v == VALUES[expected]
    assert (expected == 0) == (outlier > 20)


def test_tokens_without_weight_do_not_matter() -> None:
    """Outliers of V at tokens that no query attends to, at this scale of the logits."""
    q, k, v = states()
    q, k = q + 3, k + 3
    k[:, :, :70] -= 6
    v[:, :, :70, 5] *= 100
    assert choose(q, k, v, scaling=1.0).v != SAFE.v
    assert choose(q, k, v, scaling=0.0).v == SAFE.v


def test_autocast_does_not_change_a_choice() -> None:
    """In bfloat16, logits of hundreds would be off by units, and the weights by a factor."""
    for bias in (0.0, 20.0, 100.0):
        q, k, v = states(bias=bias)
        plans = []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                plans.append(choose(10 * q, k, v))
        assert plans[0] == plans[1]


@pytest.mark.parametrize("way", ["these", "other keys", "other queries"])
def test_only_the_queries_of_these_keys_count(way: str) -> None:
    q, k, v = states()
    cache = FP8PagedCache(config(), page_size=8)
    key, value = cache.update(k, v, 0)
    key = key.clone() if way == "other keys" else key
    attend(q[:, :, 1:] if way == "other queries" else q, key, value, DIM**-0.5)
    assert (cache.plan[0] == SAFE) == (way != "these")
    torch.testing.assert_close(cache.layers[0].keys.dense(), k, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dead", ["query", "key", "value"])
def test_a_head_without_errors_agrees_to_every_plan(dead: str) -> None:
    """A head of zeros, or without queries. If all heads are such, the plan stays the safe one."""
    q, k, v = states()
    {"query": q[:, GROUPS:], "key": k[:, 1:], "value": v[:, 1:]}[dead].zero_()
    assert choose(q, k, v) == choose(*states())
    {"query": q, "key": k, "value": v}[dead].zero_()
    plan = choose(q, k, v)
    assert (plan.v == SAFE.v) if dead == "value" else (plan.k == SAFE.k)


def test_only_tokens_that_a_late_query_sees_count() -> None:
    """Not the tokens behind the window, and not the first queries, which see few keys."""
    q, k, v = states()
    expected = choose(q, k, v, of=config(window=100))
    k[:, 0, :190, 7] = 1e4
    assert choose(q, k, v, of=config(window=100)) == expected
    assert choose(q, k, v) != expected
    q, k, v = states()
    q[:, :, : TOKENS // 4] = torch.inf
    assert choose(q, k, v) == choose(*states()) != SAFE
    v[:, 0, -1, 7] = torch.inf
    assert choose(q, k, v) == SAFE, "values that are not finite decide nothing"


def test_values_may_have_another_size() -> None:
    q, k, v = states()
    plan = choose(q, k, v[..., :48].contiguous())
    assert plan.k == choose(q, k, v).k
    assert plan.v.rotated


def test_layers_with_a_window_keep_their_last_tokens() -> None:
    """Layers with a window and without, with other RoPE, and logits with their own scale."""
    model, _ = tiny("gemma3_text", attn_implementation="fp8_paged", sliding_window=20)
    ids = torch.randint(4, 90, (1, 60), generator=torch.Generator().manual_seed(3))
    chosen, exact = (FP8PagedCache(model.config, page_size=8, dtype=x) for x in (None, "auto"))
    for cache in (chosen, exact):
        model(ids, past_key_values=cache)
    assert SAFE not in chosen.plan.values()
    for layer, other in zip(chosen.layers, exact.layers, strict=True):
        for stored, expected in ((layer.keys, other.keys), (layer.values, other.values)):
            dense, right = stored.dense(), expected.dense()
            assert dense.shape == right.shape
            assert (dense - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("way", ["file", "pickle"])
def test_a_cache_that_was_saved_chooses_as_before(way: str, is_empty: bool, tmp_path: Path) -> None:
    """A loaded cache has no config, but it still compares plans at other positions."""
    model, _ = tiny("qwen2", attn_implementation="fp8_paged", key_bias=10.0)
    ids = torch.randint(4, 90, (1, 60), generator=torch.Generator().manual_seed(3))
    expected = FP8PagedCache(model.config, page_size=8)
    cache = copy.deepcopy(expected) if is_empty else expected
    model(ids, past_key_values=expected)
    if way == "file":
        again = FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))
    else:
        again = pickle.loads(pickle.dumps(cache))
    again.reset()
    model(ids, past_key_values=again)
    assert again.plan == expected.plan
    for layer, other in zip(again.layers, expected.layers, strict=True):
        assert_same(layer.keys.dense(), other.keys.dense())


def run(tokens: int = 40, attention: str = "fp8_paged", **keywords: Any) -> FP8PagedCache:
    model, _ = tiny("gqa", attn_implementation=attention)
    cache = FP8PagedCache(model.config, page_size=8, **keywords)
    ids = torch.randint(4, 90, (1, tokens), generator=torch.Generator().manual_seed(3))
    model(ids, past_key_values=cache)
    model(ids[:, :3], past_key_values=cache)
    return cache


def test_the_first_call_chooses_until_a_reset() -> None:
    # One layer has a center, the other one does not.
    cache = run(tokens=80)
    chosen = cache.plan
    assert {plan.k.centered for plan in chosen.values()} == {False, True}
    assert SAFE not in chosen.values()
    assert cache.fork().plan == chosen
    cache.reset()
    k = torch.randn(1, 2, 3, 16)
    for index in range(len(cache.layers)):
        cache.update(k, k, index)
    assert set(cache.plan.values()) == {SAFE}


@pytest.mark.parametrize("name", ["gqa", "gemma3_text"])
def test_the_longest_sequence_of_a_padded_batch_decides(name: str) -> None:
    model, _ = tiny(name, attn_implementation="fp8_paged")
    ids = torch.randint(4, 90, (2, 44), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alone, batch = FP8PagedCache(model.config), FP8PagedCache(model.config)
    model(ids[1:, 4:], past_key_values=alone)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=batch)
    assert batch.plan == alone.plan
    assert any(plan != SAFE for plan in alone.plan.values())


@pytest.mark.parametrize("tokens", [0, 1, 31])
def test_padding_is_not_measured(tokens: int) -> None:
    """The first chunk of a prompt may be padding only."""
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    ids = torch.randint(4, 90, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.zeros_like(ids)
    mask[:, 40 - tokens :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = FP8PagedCache(model.config)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    assert set(cache.plan.values()) == {SAFE}


@pytest.mark.parametrize("attention", ["fp8_paged", "sdpa"])
def test_a_dropped_cache_is_freed(attention: str) -> None:
    cache = run(attention=attention)
    storages = [weakref.ref(layer.keys.k_codes.untyped_storage()) for layer in cache.layers]
    del cache
    gc.collect()
    assert not any(storage() for storage in storages)


def test_tokens_that_replace_others_keep_the_plan() -> None:
    """A press, for example, drops tokens after the first call."""
    cache = run(tokens=80)
    before = cache.plan
    layer = cache.layers[0]
    kept = [x.dense()[:, :, ::2] for x in (layer.keys, layer.values)]
    layer.keys, layer.values = kept
    assert layer.get_seq_length() == kept[0].shape[2]
    assert cache.plan == before
    assert SAFE not in before.values()
    for dense, stored in zip(kept, (layer.keys, layer.values), strict=True):
        torch.testing.assert_close(stored.dense(), dense, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "keywords", [{"tokens": 31}, {"attention": "sdpa"}, {"max_cache_len": 64}], ids=str
)
def test_the_plan_is_safe_if_nothing_is_measured(keywords: dict[str, Any]) -> None:
    assert set(run(**keywords).plan.values()) == {SAFE}


def test_the_flags_limit_the_choice() -> None:
    assert not any(
        p.k.rotated or p.v.rotated
        for p in run(rotate_keys=False, rotate_values=False).plan.values()
    )
    plans = run(rotate_keys=True, rotate_values=True, center_keys=False).plan.values()
    assert all(p.k.rotated and p.v.rotated and not p.k.centered for p in plans)
    assert {p.v.format for p in run(value_dtype="fp8").plan.values()} == {"fp8_e4m3"}


def test_an_explicit_plan() -> None:
    plan = {0: LayerPlan.parse("int8 rotated", "auto"), 1: LayerPlan.parse("fp8_e4m3", "fp8")}
    cache = run(plan=plan)
    assert cache.plan == plan
    assert "int8 rotated" in repr(cache.layers[0])
    again = run(plan=run().plan)
    assert again.plan == run().plan


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"plan": SAFE, "dtype": "fp8"}, "leave that out"),
        ({"plan": SAFE, "scales": 1.0}, "leave that out"),
        ({"plan": SAFE, "rotate_keys": False}, "leave that out"),
        ({"plan": "int8"}, "expected a LayerPlan"),
        ({"plan": {}}, "expected a LayerPlan"),
        ({"plan": {0: SAFE}}, "got none for layer 1; add it"),
        ({"plan": dict.fromkeys(range(4), SAFE)}, r"from 0 to 1, .*got \[2, 3\], too; leave these"),
        ({"plan": dict.fromkeys(range(4), SAFE), "max_cache_len": 64}, r"from 0 to 1, .*\[2, 3\]"),
        ({"plan": {-1: SAFE}}, "numbers from 0, got -1; name layers"),
        ({"plan": {0: "int8"}}, "LayerPlan for layer 0"),
        ({"plan": LayerPlan("int8", "int8")}, "expected a SidePlan for k, got 'int8'"),
        ({"plan": {0: SAFE, 1: LayerPlan(SAFE.k, None)}}, "expected a SidePlan for v, got None"),
        ({"plan": LayerPlan.parse("int8", "int8 centered")}, "; leave 'centered' out"),
        ({"rotate_keys": 1.5}, "None, True or False, got 1.5; leave it out"),
        ({"rotate_keys": torch.ones(2)}, "None, True or False"),
        ({"rotate_keys": True, "key_dtype": "auto"}, "'auto', .*or choose a key_dtype"),
        ({"rotate_values": True, "dtype": "auto"}, "'auto', .*or choose a value_dtype"),
    ],
    ids=str,
)
def test_contradictions_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FP8PagedCache(causal_config("llama"), **keywords)


def test_a_plan_that_cannot_be_read() -> None:
    unreadable: list[Any] = ["", "int9", "int8 turned", "auto rotated", None]
    for text in unreadable:
        with pytest.raises(ConfigError, match=r"; write it|expected one of|; choose an 8-bit"):
            SidePlan.parse(text)
    with pytest.raises(ConfigError, match="rotated: expected True or False, got 'rotated'"):
        SidePlan("int8", "rotated")
