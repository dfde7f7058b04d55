"""Tests of the choice of scales: the cost of errors, the scale of least cost, and centers.

The costs are compared with their definition in float64.
"""

import math

import pytest
import torch
from tqdm import tqdm

from hf_fp8kv import KVScales
from hf_fp8kv.calibration import choose, queries, scoring, stages
from hf_fp8kv.calibration.choose import Candidate, find_centers, measure_costs, pick_scale
from hf_fp8kv.calibration.divergence import Scores
from hf_fp8kv.calibration.observe import Batch, make_batches, measure_range, observe, paged_layers
from hf_fp8kv.calibration.queries import Queries, observe_queries
from hf_fp8kv.calibration.rope import FarPositions, Partners, match_channels, measure_partners
from hf_fp8kv.calibration.stages import CalibrationOptions, Job, weigh_keys
from hf_fp8kv.formats import FORMATS, SidePlan
from hf_fp8kv.formats.codec import SEARCH_STEPS, decode, encode
from hf_fp8kv.scales.layer_scales import LayerScales
from tests.helpers.tiny_models import VOCAB, tiny

pytestmark = pytest.mark.text

E4M3, E3M4 = FORMATS["fp8_e4m3"], FORMATS["fp8_e3m4"]
HEADS, GROUP, TOKENS, DIM = 2, 3, 7, 4
AT = torch.tensor([2, 4, 6])


@pytest.fixture
def states() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random queries and keys."""
    return torch.randn(HEADS * GROUP, len(AT), DIM), torch.randn(TOKENS, HEADS, DIM)


def naive_cost(side: str, queries: Queries, error: torch.Tensor) -> torch.Tensor:
    """Return the cost of `error`, `[N, Hkv, D]`, per head and channel: `[Hkv, 1 + D]`, float64."""
    w, e = queries.weights.double(), error.double().transpose(0, 1)[:, None]
    mean = (w[..., None] * e).sum(-2)
    if side == "v":
        per_channel = mean.square()
        per_head = per_channel.sum(-1, keepdim=True)
    else:
        q = queries.q.double()
        score_error = (q[..., None, :] * e).sum(-1)
        mean_error = (w * score_error).sum(-1, keepdim=True)
        per_head = (w * (score_error - mean_error) ** 2).sum(-1, keepdim=True)
        per_channel = q**2 * (w[..., None] * (e - mean[..., None, :]) ** 2).sum(-2)
    return torch.cat([per_head, per_channel], -1).sum(1)


# -- queries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "scaling", "at"),
    [(None, 1.0, [2, 4, 6]), (1, 0.3, [2, 4, 6]), (3, 1.0, [6, 0, 3]), (100, 0.3, [6, 0, 3])],
)
def test_attention_weights_do_not_depend_on_the_order_of_queries(states, window, scaling, at):
    (q, k), at = states, torch.tensor(at)
    queries = Queries.from_states(q, k, at, scaling, window)
    dots = torch.einsum("hgqd,nhd->hgqn", q.view(HEADS, GROUP, -1, DIM), k).double() * scaling
    age = at[:, None] - torch.arange(TOKENS)
    hidden = (age < 0) | (age >= (window or TOKENS))
    expected = dots.masked_fill(hidden, -math.inf).softmax(-1)
    weights = queries.weights.view_as(expected)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    assert (weights == 0).equal(expected == 0)
    torch.testing.assert_close(queries.q.view_as(q), q * scaling)


def test_queries_of_mismatched_shapes_are_none(states):
    q, k = states
    assert Queries.from_states(q[:5], k, AT, 1.0, None) is None
    assert Queries.from_states(q[..., :3], k, AT, 1.0, None) is None


# -- cost of errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_cost_of_errors_matches_its_definition(states, side):
    q, k = states
    queries = Queries.from_states(q, k, AT, 1.0, None)
    error = torch.randn(TOKENS, HEADS, DIM) + 0.5
    expected = naive_cost(side, queries, error).float()
    for granularity in ("tensor", "head"):
        torch.testing.assert_close(queries.cost(side, error, granularity), expected[:, :1])
    torch.testing.assert_close(queries.cost(side, error, "channel"), expected[:, 1:])
    # Errors of V have different weights, so all heads and channels have different costs.
    assert len(set(expected.flatten().tolist())) == HEADS * (1 + DIM)


# -- cost of scales --------------------------------------------------------------------------------


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt) -> torch.Tensor:
    """Encode and decode `x`, by the specification."""
    return decode(encode(x / scale, fmt), fmt) * scale


SCALES = {
    "tensor": torch.tensor([[0.007]]),
    "head": torch.tensor([[0.007], [0.011]]),
    "channel": torch.linspace(0.006, 0.012, HEADS * DIM).view(HEADS, DIM),
}
SUMS = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}


def candidate(side, first, reach=None, *, center=None, granularity="head", fmt=E4M3) -> Candidate:
    plan = SidePlan(fmt.name, centered=center is not None)
    return Candidate(side, plan, center, first, first if reach is None else reach, granularity)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_the_cost_of_a_scale_is_the_cost_of_its_rounding_errors(states, side, granularity):
    """Every scale of an octave is compared, per head or channel according to the granularity."""
    q, k = states
    queries = Queries.from_states(q, k, AT, 1.0, None)
    center = torch.randn(HEADS, DIM) if side == "k" and granularity != "tensor" else None
    tried = candidate(side, SCALES[granularity], center=center, granularity=granularity, fmt=E3M4)
    costs = measure_costs(tried, k, queries)
    x = k if center is None else k - center
    for step in range(SEARCH_STEPS):
        scale = SCALES[granularity] * 2 ** (step / SEARCH_STEPS)
        error = quantize(x, scale, E3M4) - x
        each = naive_cost(side, queries, error)
        # The cost of a candidate is the sum over its heads.
        for weights, cost in ((queries, each[:, 0].sum()), (None, error.double().square().sum())):
            whole = tried.measure(k, weights, scale / E3M4.scale_from_e4m3).sum().double()
            torch.testing.assert_close(whole, cost, rtol=1e-3, atol=1e-9)
        expected = each[:, 1:] if granularity == "channel" else each[:, :1]
        if granularity == "tensor":
            expected = expected.sum(0, keepdim=True)
        torch.testing.assert_close(costs[0, step], expected, rtol=1e-3, atol=1e-9)
        for octave in range(4):
            larger = scale * 2**octave
            square = (quantize(x, larger, E3M4) - x).double().square()
            expected = square.sum(SUMS[granularity], keepdim=True)[0]
            torch.testing.assert_close(costs[1 + octave, step], expected)
    assert costs.dtype == torch.float64


def test_higher_octaves_are_tried_on_tokens_of_the_whole_text():
    """All of 384 tokens are zero except one near the end, which is among the tried tokens."""
    x = torch.zeros(3 * 128, 1, 4)
    x[-3] = 0.3
    assert measure_costs(candidate("v", torch.ones(1, 1)), x, None)[1, 1] > 0


# -- choice of a scale -----------------------------------------------------------------------------


def chosen_scale(first, reach, cost, room, *, granularity="head", fmt=E4M3) -> torch.Tensor:
    """Return the chosen scales, in the unit of the format."""
    tried = candidate("v", first, reach, granularity=granularity, fmt=fmt)
    return pick_scale(tried, torch.cat([cost[None], room])) * fmt.scale_from_e4m3


def minimum_at(*steps: int) -> torch.Tensor:
    """Return costs, `[16, len(steps), 1]`, whose minimum for head `i` is at `steps[i]`."""
    cost = torch.full((SEARCH_STEPS, len(steps), 1), 5.0).double()
    for head, step in enumerate(steps):
        cost[step, head] = 1.0
        cost[(step + 3) % SEARCH_STEPS, head] = 9.0
    return cost


COSTLY = torch.tensor([1.0, 2.0, 2.0, 2.0]).double()


def octave_costs(*heads: torch.Tensor) -> torch.Tensor:
    """Expand the costs per octave, `[4]`, of H heads to `[4, 16, H, 1]`, equal for every step."""
    return torch.stack(heads, 1)[:, None, :, None].expand(-1, SEARCH_STEPS, -1, -1).clone()


@pytest.mark.parametrize("fmt", [E4M3, E3M4], ids=lambda fmt: fmt.name)
def test_the_scale_of_least_cost_is_chosen(fmt):
    first = torch.tensor([[0.5], [3.0]])
    scale = chosen_scale(first, first, minimum_at(5, 12), octave_costs(COSTLY, COSTLY), fmt=fmt)
    expected = first * torch.tensor([[2 ** (5 / 16)], [2 ** (12 / 16)]])
    torch.testing.assert_close(scale, expected)
    # All costs are zero without queries, so the smallest scale is chosen.
    no_cost = torch.zeros(SEARCH_STEPS, 2, 1).double()
    assert chosen_scale(first, first, no_cost, octave_costs(COSTLY, COSTLY)).equal(first)
    # One scale for a whole layer is a scalar.
    single = first[:1]
    scale = chosen_scale(single, single, minimum_at(7), octave_costs(COSTLY), granularity="tensor")
    torch.testing.assert_close(scale, torch.tensor(0.5 * 2 ** (7 / 16)))


FREE = torch.ones(4).double()


@pytest.mark.parametrize(
    ("reach", "room", "octaves"),
    [
        (100.0, FREE, 3),
        (1.0, FREE, 0),
        (1.5, FREE, 1),
        (2.0, FREE, 1),
        (3.0, FREE, 2),
        (100.0, COSTLY, 0),
        (100.0, torch.tensor([1.0, 1.01, 1.5, 1.5]), 1),
        (100.0, torch.tensor([1.0, 1.5, 1.01, 1.01]), 0),
        (100.0, torch.tensor([1.0, 1.01, 1.5, 1.01]), 1),
        (100.0, torch.tensor([1.0, 1.015, 1.015, 1.1]), 2),
    ],
)
def test_a_scale_grows_up_to_its_reach_if_that_is_free(reach, room, octaves):
    """A scale grows no further than needed for `reach`, and not past an octave with a cost."""
    scale = chosen_scale(
        torch.ones(2, 1), torch.tensor([[reach], [1.0]]), minimum_at(0, 0),
        octave_costs(room.double(), FREE),
    )  # fmt: skip
    assert scale.flatten().tolist() == [2.0**octaves, 1.0]


def test_higher_octaves_have_the_costs_of_the_chosen_step():
    room = octave_costs(COSTLY)
    room[:, 5] = 1.0
    ones = torch.ones(1, 1)
    assert chosen_scale(ones, 100 * ones, minimum_at(5), room) > 8
    assert chosen_scale(ones, 100 * ones, minimum_at(6), room) < 2


def test_scales_do_not_grow_if_small_values_would_become_subnormal():
    """One large value makes all smaller values subnormal in E3M4 but not in E4M3."""
    x = 0.004 * torch.randn(64, 1, 64)
    x[0, 0, 0] = 1.0
    octaves = {}
    for fmt in (E4M3, E3M4):
        first = (x.abs().amax() / fmt.max).view(1, 1)
        tried = candidate("k", first, 100 * first, fmt=fmt)
        costs = measure_costs(tried, x, None)
        assert (costs[0] == 0).all()
        scale = pick_scale(tried, costs)
        octaves[fmt.name] = (scale * fmt.scale_from_e4m3 / first).item()
    assert octaves == {"fp8_e4m3": pytest.approx(8.0), "fp8_e3m4": pytest.approx(1.0)}


# -- candidates ------------------------------------------------------------------------------------


@pytest.fixture
def ranges() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ranges of a biased K and of a V with another head size, and K's partners."""
    k = torch.randn(20, HEADS, DIM) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 5.0
    return k, torch.randn(20, HEADS, 6), torch.tensor([2, 1, 0, 3])


def pair_norm(k: torch.Tensor) -> torch.Tensor:
    """Return the norms of pairs, `[Hkv, D]`. Channels 0 and 2 are a pair, 1 and 3 are single."""
    norms = k.abs().clone()
    for channel in (0, 2):
        norms[..., channel] = (k[..., 0] ** 2 + k[..., 2] ** 2).sqrt()
    return norms.amax(0)


def candidates_of(ranges, partner, options, *near_and_far) -> dict[str, list[Candidate]]:
    near_range, far_range = (*near_and_far, None, None)[:2]
    return choose.list_candidates(
        0, ranges, Partners(partner), options, near_range, far_range, may_rotate=False
    )


def first_candidates(k, v, partner, granularity, *, margin=1.0, center=True, fmt=E4M3):
    options = CalibrationOptions(granularity, fmt, margin, center)
    candidates = candidates_of(measure_range(k, v, partner, None), partner, options)
    assert {c.fmt for side_candidates in candidates.values() for c in side_candidates} == {fmt}
    centered = {"k_centered": candidates["k"][1]} if candidates["k"][1:] else {}
    return {side: side_candidates[0] for side, side_candidates in candidates.items()} | centered


@pytest.mark.parametrize("fmt", [E4M3, E3M4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("margin", [1.0, 1.5])
@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_candidates_cover_the_observed_range_and_reach(ranges, granularity, margin, fmt):
    k, v, partner = ranges
    candidates = first_candidates(k, v, partner, granularity, margin=margin, fmt=fmt)
    dims = {"tensor": (0, 1), "head": (1,), "channel": ()}[granularity]
    mean = k.double().mean(0).float()
    expected = {
        "k": (k.abs().amax(0), pair_norm(k), None),
        "v": (v.abs().amax(0), v.abs().amax(0), None),
        "k_centered": ((k - mean).abs().amax(0), pair_norm(k) + mean.abs(), mean),
    }
    assert candidates.keys() == expected.keys()
    for name, (amax, reach, center) in expected.items():
        first = reach if granularity == "channel" else amax
        if dims:
            first, reach = (x.amax(dims, keepdim=True) for x in (first, reach))
        tried = candidates[name]
        torch.testing.assert_close(tried.min_scale * fmt.max, first * margin)
        torch.testing.assert_close(tried.far_scale * fmt.max, reach * margin)
        assert (tried.center is None) == (center is None)
        if center is not None:
            torch.testing.assert_close(tried.center, center)


def test_a_center_is_tried_only_if_requested(ranges):
    assert first_candidates(*ranges, "head", center=False).keys() == {"k", "v"}


def test_keys_have_no_scale_per_channel_if_pairs_are_unknown(ranges):
    k, v, _ = ranges
    candidates = first_candidates(k, v, None, "channel")
    assert candidates["k"].min_scale.shape == candidates["k_centered"].min_scale.shape == (HEADS, 1)
    assert candidates["v"].min_scale.shape == v.shape[1:]


# -- choice on a model -----------------------------------------------------------------------------


def pass_queries(job, batch, on_layer):
    observe_queries(job.model, batch, job.layers, on_layer)


def make_job(model, *, center=False) -> Job:
    options = CalibrationOptions("head", E4M3, 1.0, center)
    return Job(model, paged_layers(model), options, tqdm(disable=True))


@pytest.fixture(scope="module")
def sliding():
    """Return a model in which every layer attends to 8 tokens."""
    return tiny("mistral")[0]


def random_windows(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def observed(model, window: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    observe(model, Batch((window,)), paged_layers(model), lambda i, k, v: pairs.update({i: (k, v)}))
    return pairs


# Grid: full attention and windows, an unusual scaling, and fewer or more tokens than queries.
@pytest.mark.parametrize(
    ("name", "config", "tokens", "window"),
    [
        ("mistral", {}, 30, 8),
        ("mistral", {}, 100, 8),
        ("llama", {}, 100, 100),
        ("gemma3_text", {"query_pre_attn_scalar": 7}, 100, 100),
    ],
)
def test_queries_match_the_attention_of_the_model(name, config, tokens, window):
    """Queries lie in the last three quarters. Their weights are rows of the model's attention."""
    model, (ids,) = tiny(name, **config)[0], random_windows(tokens)
    calls: list[Queries] = []
    batch = Batch((ids,))
    pass_queries(make_job(model), batch, lambda i, k, v, queries: calls.append(queries))
    eager = tiny(name, attn_implementation="eager", **config)[0]
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attention = eager(input_ids=ids[None], output_attentions=True).attentions
    assert len(calls) == len(attention)
    at = torch.linspace(tokens // 4, tokens - 1, min(64, tokens)).long()
    assert (at[0], at[-1]) == (tokens // 4, tokens - 1)
    num_attended = []
    for weights, call in zip(attention, calls, strict=True):
        expected = weights[0][:, at]
        num_attended.append((expected > 0).sum(-1).max())
        torch.testing.assert_close(call.weights.view_as(expected), expected, rtol=1e-3, atol=1e-5)
    assert max(num_attended) == window


def test_a_batch_of_several_texts_has_no_queries(sliding):
    calls: list[Queries | None] = []
    batch = Batch(tuple(random_windows(12, 9)))
    pass_queries(make_job(sliding), batch, lambda i, k, v, queries: calls.append(queries))
    assert calls == [None, None]


def choose_scales_on(model, windows) -> tuple[dict[int, LayerScales], dict[int, choose.Sides]]:
    """Return the chosen scales and the candidates of each layer."""
    job = make_job(model)
    partners = measure_partners(model, windows[0], job.layers)
    ranges = stages.collect_ranges(job, "text", [Batch((window,)) for window in windows], partners)
    candidates = {i: candidates_of(r, partners[i].k, job.options) for i, r in ranges.items()}
    scales = choose.make_scales(job, windows, candidates)
    return choose.choose_scales(job, windows, FarPositions(0), scales, "a text")[0], candidates


@pytest.mark.parametrize("count", [3, 20])
def test_costs_are_summed_over_all_sampled_windows(sliding, count):
    windows = random_windows(*range(20, 20 + count))
    chosen, candidates = choose_scales_on(sliding, windows)
    assert stages.SAMPLE_WINDOWS == 8  # as docs/calibrate.md says
    batches = make_batches(stages.sample_windows(windows), 1)
    lengths = {batch.tokens for batch in batches}
    assert len(lengths) == len(batches) == min(count, 8)
    # The sample covers the whole list instead of the first eight windows.
    assert max(lengths) - min(lengths) >= min(count - 1, 14)
    sums: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}}

    def add(index, k, v, queries):
        assert queries is not None
        for side, x in (("k", k), ("v", v)):
            cost = measure_costs(candidates[index][side][0], x, queries)
            sums[index][side] = sums[index].get(side, 0) + cost

    for batch in batches:
        pass_queries(make_job(sliding), batch, add)
    for index, layer in chosen.items():
        assert layer.plan is None
        for side in "kv":
            expected = pick_scale(candidates[index][side][0], sums[index][side])
            assert getattr(layer, side).equal(expected)


def test_attention_without_queries_gets_the_smallest_scales(sliding, monkeypatch):
    monkeypatch.setattr(queries, "watched_attention", lambda *_: queries.nullcontext())
    windows = random_windows(20, 24)
    chosen, _ = choose_scales_on(sliding, windows)
    for index in chosen:
        values = [observed(sliding, window)[index][1] for window in windows]
        amax = torch.cat(values).abs().amax((0, 2))
        torch.testing.assert_close(chosen[index].v, amax[:, None] / 448)


# -- centers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")[0]


@pytest.mark.parametrize(
    ("gains", "helps"),
    [
        # Comments give the mean of the gains and two standard errors.
        ([0.2, 0.2, 0.2, 0.2], True),
        ([-0.2, -0.2, -0.2, -0.2], False),
        ([0.0, 0.0, 0.0, 0.0], False),
        ([0.3, -0.1, 0.3, -0.1], False),  # 0.1, 0.23
        ([0.3, 0.05, 0.3, 0.05], True),  # 0.175, 0.144
        ([0.3, 0.02, 0.3, 0.02], False),  # 0.16, 0.162: between one error and two
        ([-0.3, 0.3, -0.3, -0.3], False),
        ([0.3], False),
    ],
)
def test_a_center_needs_a_significant_gain(llama, monkeypatch, gains, helps):
    ones, kl = torch.ones(len(gains)), torch.tensor(gains).double()

    def score(job, name, batches, caches):
        scales = {name: make() for name, make in caches.items()}
        assert (scales["with"].centered, scales["without"].centered) == (True, False)
        return {"without": Scores(ones, ones, ones), "with": Scores(ones - kl, ones, ones)}

    monkeypatch.setattr(scoring, "score_caches", score)
    monkeypatch.setattr(scoring, "FP8PagedCache", lambda *_, scales, **kwargs: scales)
    plain = LayerScales(ones[:1, None], ones[:1, None])
    centered = LayerScales(plain.k, plain.v, torch.ones(1, 16))
    base, best = KVScales({0: plain, 1: plain}), KVScales({0: plain, 1: centered})
    job = make_job(llama, center=True)
    chosen, reason = scoring.check_plans(job, random_windows(24, 24), base, best, FarPositions(24))
    assert chosen is (best if helps else base)
    assert reason.startswith(
        "Centers in 1 of 2 layers: KL" if helps else "No centers: the gain is uncertain"
    )


def sums_of(weight: list[float], weighted: list[float]) -> dict[str, torch.Tensor]:
    names = ("weight_sum", "weighted_sum")
    return {n: torch.tensor([x]).double() for n, x in zip(names, (weight, weighted), strict=True)}


def test_the_center_is_the_weighted_mean_of_the_sample_and_its_scale_covers_it():
    ranges, far_range = (
        measure_range(k, k, torch.tensor([1, 0]), None)
        for k in (torch.tensor([[[4.0, 1.0]], [[6.0, 3.0]]]), torch.tensor([[[-4.0, 2.0]]]))
    )
    near_range = ranges | sums_of([1.0, 1.0], [6.0, 1.5])
    far_range |= sums_of([3.0, 1.0], [-18.0, 3.5])
    options = CalibrationOptions("head", E4M3, 1.0, True)
    without_sample, windows, with_far = (
        candidates_of(ranges, None, options, *sample)["k"]
        for sample in ((), (near_range,), (near_range, far_range))
    )
    assert [candidate.center.tolist() for candidate in without_sample[1:]] == [[[5.0, 2.0]]]
    (window_center,), (weighted, evenly) = windows[1:], with_far[1:]
    torch.testing.assert_close(window_center.center, torch.tensor([[6.0, 1.5]]))
    torch.testing.assert_close(weighted.center, torch.tensor([[-3.0, 2.5]]))
    # The mean of the windows has a weight of one ninth.
    torch.testing.assert_close(evenly.center, torch.tensor([[-3.0, 2.0]]))
    # The range reaches from the center, -3, to 6, which only the near text has.
    for candidate in (weighted, evenly):
        assert candidate.min_scale.item() == pytest.approx(9 / 448, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 8.0])
def test_a_channel_without_attention_has_the_plain_mean_as_center(weight):
    k = torch.tensor([[[1.0, 3.0]], [[5.0, 5.0]]])
    ranges = measure_range(k, k, None, None)
    sample = ranges | sums_of([0.0, weight], [0.0, 4.5 * weight])
    (center,), _ = find_centers(ranges, sample, None)
    expected = torch.tensor([[3.0, 4.5 if weight else 4.0]])
    torch.testing.assert_close(center, expected, rtol=1e-5, atol=0)


def test_the_weight_of_a_value_of_k_is_the_cost_of_its_error(states):
    q, k = states
    queries = Queries.from_states(q, k, AT, 0.5, 3)
    sums = weigh_keys(k, queries)
    expected = {name: torch.zeros(HEADS, DIM, dtype=torch.float64) for name in sums}
    for n in range(TOKENS):
        error = torch.zeros_like(k)
        error[n] = 2.0
        cost = queries.cost("k", error, "channel").double() / 4
        expected["weight_sum"] += cost
        expected["weighted_sum"] += cost * k[n]
    for name, weight in sums.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)
    equal = weigh_keys(k, None)
    assert (equal["weight_sum"] == TOKENS).all()
    torch.testing.assert_close(equal["weighted_sum"], k.sum(0).double())


def test_a_sample_is_weighted_by_the_queries_of_the_model(llama):
    job, windows = make_job(llama, center=True), random_windows(24, 24, 24)
    batches = make_batches(stages.sample_windows(windows), 1)
    partners = measure_partners(llama, windows[0], job.layers)
    sample = stages.collect_ranges(job, "sample", batches, partners, observe_queries)
    weighted: dict[int, list[torch.Tensor]] = {index: [] for index in sample}

    def weigh(index, k, v, queries):
        weighted[index].append(weigh_keys(k, queries)["weighted_sum"])

    for batch in batches:
        pass_queries(job, batch, weigh)
    for index, sums in sample.items():
        k = torch.cat([observed(llama, window)[index][0] for window in windows])
        assert sums["count"] == len(k) == 72
        torch.testing.assert_close(sums["k_max"], k.amax(0))
        torch.testing.assert_close(sums["weighted_sum"], sum(weighted[index]))


# -- partners --------------------------------------------------------------------------------------


def test_partners_must_choose_each_other():
    """Channel 1 changes opposite to channel 0, and more exactly opposite to channel 2."""
    change = torch.randn(4096, dtype=torch.float64)
    noise = torch.randn(2, 4096, dtype=torch.float64)
    changes = [-change + 0.5 * noise[0], change, -change, noise[1]]
    base = torch.full((4096, 4), 20.0, dtype=torch.float64)
    rotated = base + torch.stack(changes, 1) * 3.0
    # The changed share is so large that all channels count as rotated.
    near_norms, far_norms = ((x - 10.0).clamp(min=0.1).sqrt()[:, None] for x in (base, rotated))
    assert match_channels(near_norms, far_norms).tolist() == [0, 2, 1, 3]
