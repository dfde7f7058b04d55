"""How a layer is stored, chosen by its first call: what is taken, what is refused, what is kept."""

import copy
import dataclasses
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.cache import choice
from hf_fp8kv.cache.choice import choose_plan, weigh_plans
from hf_fp8kv.cache.queries import Queries
from hf_fp8kv.cache.turns import STILL, Turns
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from hf_fp8kv.formats.codec import decode, dynamic_scale, encode
from hf_fp8kv.formats.rotation import rotate
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import causal_config, tiny

pytestmark = pytest.mark.text

SAFE = LayerPlan.parse("fp8_e3m4 centered", "fp8_e3m4")
HEADS, GROUPS, TOKENS, DIM = 2, 3, 300, 64
PLANS = FP8PagedCache().options.k_plans, FP8PagedCache().options.v_plans


def states(outlier: float = 1.0, bias: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values; a pair of channels of one head is larger in K, smaller in Q."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, TOKENS, DIM, generator=generator)
        for heads in (HEADS * GROUPS, HEADS, HEADS)
    )
    k = k + bias * torch.randn(HEADS, 1, DIM, generator=generator)
    for channel in (5, 5 + DIM // 2):
        k[0, :, channel] *= outlier
        q[:GROUPS, :, channel] /= outlier
    return q, k, v


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> LayerPlan | None:
    center = k[:, -32:].mean(1)
    options: dict[str, Any] = {"scaling": DIM**-0.5, "window": None, "turns": STILL, **keywords}
    return choose_plan(q, k, v, center, PLANS, **options)


def test_gaussian_numbers_are_rotated_or_integers() -> None:
    plan = choose(*states())
    assert plan is not None
    assert plan.k.format in ("int8", "fp8_e2m5")
    assert plan.v.format in ("int8", "fp8_e2m5")


def test_outliers_of_one_head_are_not_rotated() -> None:
    plan = choose(*states(outlier=50.0))
    assert plan is not None
    assert not plan.k.rotated
    assert plan.k.format == "fp8_e3m4"
    assert plan.v == choose(*states()).v  # type: ignore[union-attr]


def test_a_bias_is_centered() -> None:
    plan = choose(*states(bias=20.0))
    assert plan is not None
    assert plan.k.centered


def test_a_bias_that_turns_away_is_not_trusted() -> None:
    """At the positions of the first call the center takes the bias away, at others it does not."""
    fast, still = Turns(1.0, positions=32768), Turns(1.0, moving=0.0, positions=32768)
    q, k, v = states(bias=20.0)
    assert choose(q, k, v, turns=still) == choose(q, k, v)
    turned = choose(q, k, v, turns=fast)
    assert turned is not None
    assert turned.k != choose(q, k, v).k  # type: ignore[union-attr]
    # Of positions that the model does not have, nothing is asked.
    assert choose(q, k, v, turns=dataclasses.replace(fast, positions=1000)) == choose(q, k, v)


def test_keys_are_not_rotated_where_it_is_not_known_how_they_turn() -> None:
    known, unknown = choose(*states()), choose(*states(), turns=None)
    assert known is not None
    assert unknown is not None
    assert known.k.rotated
    assert not unknown.k.rotated
    assert unknown.v == known.v
    # What a user asked for by name is rotated everywhere.
    by_name = FP8PagedCache(dtype="int8").options
    q, k, v = states()
    both = by_name.k_plans, by_name.v_plans
    plan = choose_plan(q, k, v, k[:, -32:].mean(1), both, DIM**-0.5, None, None)
    assert plan is not None
    assert plan.k.rotated


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("way", ["file", "pickle"])
@torch.no_grad()
def test_a_cache_that_was_saved_chooses_as_before(way: str, is_empty: bool, tmp_path: Path) -> None:
    """It has no config, and yet keys are tried at other positions."""
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
    for layer, other in zip(again.paged_layers, expected.paged_layers, strict=True):
        assert layer.turns == other.turns
        assert_same(layer.keys.dense(), other.keys.dense())


@pytest.mark.parametrize(("share", "is_taken"), [(0.45, True), (0.55, False)])
def test_another_plan_has_to_cost_less_than_half(
    share: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of K and of V; relative to the first plan, not to the next best one."""
    costs = torch.tensor([8.0, 9.0, 7.9, 8.5, 8.0 * share, 7.8])[:, None]

    def weigh(cost: Any, queries: Any, x: Any, center: Any, plans: Any) -> list[torch.Tensor]:
        return list(costs[: len(plans)] if center is not None else costs[[0, 4]])

    monkeypatch.setattr(choice, "weigh_plans", weigh)
    q, k, v = states()
    plans = PLANS[0], PLANS[1][:2]
    plan = choose_plan(q, k, v, k[:, -32:].mean(1), plans, DIM**-0.5, None, STILL)
    assert len(plans[0]) == len(costs)
    better = LayerPlan(plans[0][4], plans[1][1])
    assert plan == (better if is_taken else SAFE)


@pytest.mark.parametrize(("cost", "is_taken"), [(0.49, True), (0.51, False)])
def test_every_head_has_to_gain(
    cost: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the others gain; the next best plan is then taken."""
    costs = torch.tensor([[8.0, 1.0], [3.0, 0.4], [0.1, cost]])

    def weigh(ask: Any, queries: Any, x: Any, center: Any, plans: Any) -> list[torch.Tensor]:
        return list(costs[: len(plans)])

    monkeypatch.setattr(choice, "weigh_plans", weigh)
    q, k, v = states()
    plans = PLANS[0][:3], PLANS[1][:1]
    plan = choose_plan(q, k, v, k[:, -32:].mean(1), plans, DIM**-0.5, None, STILL)
    assert plan == LayerPlan(plans[0][2 if is_taken else 1], plans[1][0])


@pytest.mark.parametrize("dead", ["query", "key", "value"])
def test_a_head_without_errors_has_no_say(dead: str) -> None:
    """As one of zeros, or one that nobody asks; if all heads are such, the safe plan is as good."""
    q, k, v = states()
    {"query": q[GROUPS:], "key": k[1:], "value": v[1:]}[dead].zero_()
    assert choose(q, k, v) == choose(*states())
    {"query": q, "key": k, "value": v}[dead].zero_()
    plan = choose(q, k, v)
    assert plan is not None
    assert (plan.v == SAFE.v) if dead == "value" else (plan.k == SAFE.k)


def test_too_few_tokens_and_other_numbers_say_nothing() -> None:
    q, k, v = states()
    k[0, 3, 7] = torch.inf
    assert choose(q, k, v) is None
    assert choose(q[:5], states()[1], v) is None  # heads that are not of these keys


def test_tokens_that_are_not_looked_at_have_no_say() -> None:
    """Those behind the window, and the first queries, which see few keys; the last one has."""
    q, k, v = states()
    expected = choose(q, k, v, window=100)
    k[0, :190, 7] = 1e4
    assert choose(q, k, v, window=100) == expected
    assert choose(q, k, v) != expected
    q, k, v = states()
    q[:, : TOKENS // 4] = torch.inf
    assert choose(q, k, v) == choose(*states())
    v[0, -1, 7] = torch.inf
    assert choose(q, k, v) is None


def test_values_may_have_another_size() -> None:
    q, k, v = states()
    plan = choose(q, k, v[..., :48])
    assert plan is not None
    assert plan.k == choose(q, k, v).k  # type: ignore[union-attr]
    assert plan.v.rotated


def test_a_cost_is_that_of_what_is_read_back() -> None:
    """Nothing is rotated back to find it."""
    q, k, _ = states(bias=3.0)
    center = k[:, -32:].mean(1)
    x = torch.stack([k.transpose(0, 1), 2 * k.transpose(0, 1)])
    found = Queries.from_states(q[:, 40:60], x[0], torch.arange(40, 60), DIM**-0.5, None)
    assert found is not None
    plans = (*PLANS[0], SidePlan("fp8_e4m3", rotated=True))
    costs = weigh_plans(Queries.cost_of_keys, found, x, center, plans)
    values = weigh_plans(Queries.cost_of_values, found, x, None, plans)
    for plan, cost, of_values in zip(plans, costs, values, strict=True):
        error = read_back(x, plan, center) - x
        torch.testing.assert_close(cost, found.cost_of_keys(error, "head").sum((0, -1)))
        error = read_back(x, plan, torch.zeros(())) - x
        torch.testing.assert_close(of_values, found.cost_of_values(error, "head").sum((0, -1)))


def read_back(x: torch.Tensor, plan: SidePlan, center: torch.Tensor) -> torch.Tensor:
    fmt = FORMATS[plan.format]
    y = x - center if plan.centered else x
    y = rotate(y) if plan.rotated else y
    scale = dynamic_scale(y, fmt).float()[..., None]
    y = decode(encode(y / scale, fmt), fmt) * scale
    y = rotate(y) if plan.rotated else y
    return y + center if plan.centered else y


@torch.no_grad()
def run(tokens: int = 40, attention: str = "fp8_paged", **keywords: Any) -> FP8PagedCache:
    model, _ = tiny("gqa", attn_implementation=attention)
    cache = FP8PagedCache(model.config, page_size=8, **keywords)
    ids = torch.randint(4, 90, (1, tokens), generator=torch.Generator().manual_seed(3))
    model(ids, past_key_values=cache)
    model(ids[:, :3], past_key_values=cache)
    return cache


def test_the_first_call_chooses_and_keeps() -> None:
    # Layers with a center and without one.
    cache = run(tokens=80)
    chosen = cache.plan
    assert {plan.k.centered for plan in chosen.values()} == {False, True}
    assert SAFE not in chosen.values()
    assert cache.fork().plan == chosen
    for layer in cache.paged_layers:
        assert (layer.k_center is not None) == layer.storage.k.centered


def test_a_choice_is_that_of_the_longest_text_in_a_padded_batch() -> None:
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    ids = torch.randint(4, 90, (2, 44), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alone, batch = FP8PagedCache(model.config), FP8PagedCache(model.config)
    with torch.no_grad():
        model(ids[1:, 4:], past_key_values=alone)
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=batch)
    assert batch.plan == alone.plan
    assert any(plan != SAFE for plan in alone.plan.values())


@pytest.mark.parametrize("tokens", [0, 1, 31])
@torch.no_grad()
def test_padding_is_not_measured(tokens: int) -> None:
    """A prompt that comes in chunks may begin with nothing but padding."""
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
    pools = [weakref.ref(layer.pool) for layer in cache.paged_layers]
    del cache
    gc.collect()
    assert not any(pool() for pool in pools)


def test_tokens_that_replace_others_keep_the_plan() -> None:
    """As when a press drops tokens after the first call."""
    cache = run(tokens=80)
    layer = next(layer for layer in cache.paged_layers if layer.storage != SAFE)
    plan, center = layer.storage, layer.k_center
    assert layer.keys is not None
    assert layer.values is not None
    kept = [x.dense()[:, :, ::2] for x in (layer.keys, layer.values)]
    layer.keys, layer.values = kept
    assert layer.get_seq_length() == kept[0].shape[2]
    assert layer.storage == plan
    assert layer.k_center is center
    for dense, stored in zip(kept, (layer.keys, layer.values), strict=True):
        torch.testing.assert_close(stored.dense(), dense, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "keywords", [{"tokens": 31}, {"attention": "sdpa"}, {"max_cache_len": 64}], ids=str
)
def test_the_safe_plan_is_taken_where_nothing_is_measured(keywords: dict[str, Any]) -> None:
    assert set(run(**keywords).plan.values()) == {SAFE}


def test_the_flags_limit_the_choice() -> None:
    assert not any(
        p.k.rotated or p.v.rotated
        for p in run(rotate_keys=False, rotate_values=False).plan.values()
    )
    plans = run(rotate_keys=True, rotate_values=True, center_keys=False).plan.values()
    assert all(p.k.rotated and p.v.rotated and not p.k.centered for p in plans)
    assert {p.v.format for p in run(value_dtype="fp8").plan.values()} == {"fp8_e4m3"}


def test_the_formats_of_servers_mean_what_they_did() -> None:
    for name in ("fp8_e4m3", "fp8_e3m4", "fp8_e5m2", "fp8_e4m3fnuz"):
        assert set(run(dtype=name).plan.values()) == {LayerPlan.parse(name, name)}


def test_a_plan_by_hand() -> None:
    plan = {0: LayerPlan.parse("int8 rotated", "auto"), 1: LayerPlan.parse("fp8_e4m3", "fp8")}
    cache = run(plan=plan)
    assert cache.plan == plan
    assert "int8 rotated" in repr(cache.layers[0])
    again = run(plan=run().plan)
    assert again.plan == run().plan


def test_a_reset_chooses_again() -> None:
    cache = run()
    cache.reset()
    k = torch.randn(1, cache.paged_layers[0].pool.heads, 3, cache.paged_layers[0].pool.k_dim)
    for index in range(len(cache.layers)):
        cache.update(k, k, index)
    assert set(cache.plan.values()) == {SAFE}


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
def test_what_cannot_work_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FP8PagedCache(causal_config("llama"), **keywords)


@pytest.mark.parametrize("text", ["", "int9", "int8 turned", "auto rotated", None])
def test_a_plan_that_cannot_be_read(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"; write it as in|expected one of|; choose an 8-bit"):
        SidePlan.parse(text)


def test_a_mark_that_is_no_flag() -> None:
    with pytest.raises(ConfigError, match="rotated: expected True or False, got 'rotated'"):
        SidePlan("int8", "rotated")
