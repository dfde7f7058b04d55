"""Tests of the choice of scales: the cost of errors, the scale of minimum cost, and centers.

Costs are compared with the definition in float64.
"""

import math

import pytest
import torch
from tqdm import tqdm

from hf_fp8kv import KVScales
from hf_fp8kv.calibration import choose, scoring, stages
from hf_fp8kv.calibration import queries as queries_module
from hf_fp8kv.calibration.choose import Candidate, find_centers, measure_costs, pick_scale
from hf_fp8kv.calibration.divergence import Scores
from hf_fp8kv.calibration.observe import Batch, find_paged_layers, make_batches, measure_range
from hf_fp8kv.calibration.queries import Queries, observe_queries
from hf_fp8kv.calibration.rope import FarPositions, Partners, match_channels, measure_partners
from hf_fp8kv.calibration.stages import CalibrationOptions, Job, weigh_keys
from hf_fp8kv.formats import FORMATS, SidePlan
from hf_fp8kv.formats.codec import SEARCH_STEPS, decode, encode
from hf_fp8kv.scales.layer_scales import LayerScales
from tests.helpers.tiny_models import VOCAB, build_variant

pytestmark = pytest.mark.text

E4M3, E3M4 = FORMATS["fp8_e4m3"], FORMATS["fp8_e3m4"]
NUM_HEADS = 2  # KV heads
GROUP_SIZE = 3  # query heads per KV head
NUM_TOKENS = 7
DIM = 4  # head size
POSITIONS = torch.tensor([2, 4, 6])


@pytest.fixture
def states() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random queries, `[Hq, len(POSITIONS), D]`, and keys, `[N, Hkv, D]`."""
    q = torch.randn(NUM_HEADS * GROUP_SIZE, len(POSITIONS), DIM)
    return q, torch.randn(NUM_TOKENS, NUM_HEADS, DIM)


def compute_cost(side: str, queries: Queries, error: torch.Tensor) -> torch.Tensor:
    """Return costs of `error`, `[N, Hkv, D]`, per head and channel, `[Hkv, 1 + D]`, float64."""
    weights, error = queries.weights.double(), error.double().transpose(0, 1)[:, None]
    mean = (weights[..., None] * error).sum(-2)
    if side == "v":
        channel_costs = mean.square()
        head_costs = channel_costs.sum(-1, keepdim=True)
    else:
        q = queries.q.double()
        logit_error = (q[..., None, :] * error).sum(-1)
        mean_error = (weights * logit_error).sum(-1, keepdim=True)
        head_costs = (weights * (logit_error - mean_error) ** 2).sum(-1, keepdim=True)
        channel_costs = q**2 * (weights[..., None] * (error - mean[..., None, :]) ** 2).sum(-2)
    return torch.cat([head_costs, channel_costs], -1).sum(1)


# -- queries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "scaling", "positions"),
    [(None, 1.0, [2, 4, 6]), (1, 0.3, [2, 4, 6]), (3, 1.0, [6, 0, 3]), (100, 0.3, [6, 0, 3])],
)
def test_attention_weights_are_a_softmax_over_the_window(states, window, scaling, positions):
    (q, k), positions = states, torch.tensor(positions)
    queries = Queries.from_states(q, k, positions, scaling, window)
    grouped_q = q.view(NUM_HEADS, GROUP_SIZE, -1, DIM)
    logits = torch.einsum("hgqd,nhd->hgqn", grouped_q, k).double() * scaling
    distances = positions[:, None] - torch.arange(NUM_TOKENS)
    is_hidden = (distances < 0) | (distances >= (window or NUM_TOKENS))
    expected = logits.masked_fill(is_hidden, -math.inf).softmax(-1)
    weights = queries.weights.view_as(expected)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    assert (weights == 0).equal(expected == 0)
    torch.testing.assert_close(queries.q.view_as(q), q * scaling)


def test_queries_that_do_not_fit_the_keys_are_none(states):
    q, k = states
    assert Queries.from_states(q[:5], k, POSITIONS, 1.0, None) is None
    assert Queries.from_states(q[..., :3], k, POSITIONS, 1.0, None) is None


# -- cost of errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_cost_of_errors_matches_its_definition(states, side):
    q, k = states
    queries = Queries.from_states(q, k, POSITIONS, 1.0, None)
    error = torch.randn(NUM_TOKENS, NUM_HEADS, DIM) + 0.5
    expected = compute_cost(side, queries, error).float()
    for granularity in ("tensor", "head"):
        torch.testing.assert_close(queries.compute_cost(side, error, granularity), expected[:, :1])
    torch.testing.assert_close(queries.compute_cost(side, error, "channel"), expected[:, 1:])
    # Queries weight errors differently, so all heads and channels have different costs.
    assert len(set(expected.flatten().tolist())) == NUM_HEADS * (1 + DIM)


# -- cost of scales --------------------------------------------------------------------------------


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt) -> torch.Tensor:
    """Return `x` after encoding and decoding by the specification."""
    return decode(encode(x / scale, fmt), fmt) * scale


SCALES = {
    "tensor": torch.tensor([[0.007]]),
    "head": torch.tensor([[0.007], [0.011]]),
    "channel": torch.linspace(0.006, 0.012, NUM_HEADS * DIM).view(NUM_HEADS, DIM),
}
SUMMED_DIMS = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}


def make_candidate(side, min_scale, far_scale=None, *, center=None, granularity="head", fmt=E4M3):
    plan = SidePlan(fmt.name, centered=center is not None)
    far_scale = min_scale if far_scale is None else far_scale
    return Candidate(side, plan, center, min_scale, far_scale, granularity)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_the_cost_of_a_scale_is_the_cost_of_its_rounding_errors(states, side, granularity):
    """All scales of an octave are tried. The granularity selects costs per head or per channel."""
    q, k = states
    queries = Queries.from_states(q, k, POSITIONS, 1.0, None)
    center = torch.randn(NUM_HEADS, DIM) if side == "k" and granularity != "tensor" else None
    options = {"center": center, "granularity": granularity, "fmt": E3M4}
    candidate = make_candidate(side, SCALES[granularity], **options)
    costs = measure_costs(candidate, k, queries)
    x = k if center is None else k - center
    for step in range(SEARCH_STEPS):
        scale = SCALES[granularity] * 2 ** (step / SEARCH_STEPS)
        error = quantize(x, scale, E3M4) - x
        definition = compute_cost(side, queries, error)
        # The cost of a candidate is the sum over its heads.
        totals = definition[:, 0].sum(), error.double().square().sum()
        for weights, cost in zip((queries, None), totals, strict=True):
            actual = candidate.compute_cost(k, weights, scale / E3M4.scale_from_e4m3)
            torch.testing.assert_close(actual, cost, rtol=1e-3, atol=1e-9)
        expected = definition[:, 1:] if granularity == "channel" else definition[:, :1]
        if granularity == "tensor":
            expected = expected.sum(0, keepdim=True)
        torch.testing.assert_close(costs[0, step], expected, rtol=1e-3, atol=1e-9)
        for octave in range(4):
            larger_scale = scale * 2**octave
            square = (quantize(x, larger_scale, E3M4) - x).double().square()
            expected = square.sum(SUMMED_DIMS[granularity], keepdim=True)[0]
            torch.testing.assert_close(costs[1 + octave, step], expected)
    assert costs.dtype == torch.float64


def test_higher_octaves_are_tried_on_tokens_of_the_whole_text():
    """Only one of 384 tokens is not zero. It is near the end, and is among the tried tokens."""
    x = torch.zeros(3 * 128, 1, 4)
    x[-3] = 0.3
    assert measure_costs(make_candidate("v", torch.ones(1, 1)), x, None)[1, 1] > 0


# -- choice of a scale -----------------------------------------------------------------------------


# Costs of the first octave and of the three higher octaves, relative to the first.
RISING_COSTS = torch.tensor([1.0, 2.0, 2.0, 2.0]).double()
FLAT_COSTS = torch.ones(4).double()


def pick_test_scale(min_scale, far_scale, cost, octave_costs, *, granularity="head", fmt=E4M3):
    """Return the picked scales of a candidate, in units of the format."""
    candidate = make_candidate("v", min_scale, far_scale, granularity=granularity, fmt=fmt)
    return pick_scale(candidate, torch.cat([cost[None], octave_costs])) * fmt.scale_from_e4m3


def make_costs(*steps: int) -> torch.Tensor:
    """Return costs, `[16, len(steps), 1]`, whose minimum for head `i` is at step `steps[i]`."""
    cost = torch.full((SEARCH_STEPS, len(steps), 1), 5.0).double()
    for head, step in enumerate(steps):
        cost[step, head] = 1.0
        cost[(step + 3) % SEARCH_STEPS, head] = 9.0
    return cost


def expand_octaves(*head_costs: torch.Tensor) -> torch.Tensor:
    """Expand costs per octave, `[4]`, of H heads to `[4, 16, H, 1]`, equal for all steps."""
    return torch.stack(head_costs, 1)[:, None, :, None].expand(-1, SEARCH_STEPS, -1, -1).clone()


@pytest.mark.parametrize("fmt", [E4M3, E3M4], ids=lambda fmt: fmt.name)
def test_the_scale_of_minimum_cost_is_chosen(fmt):
    scales = torch.tensor([[0.5], [3.0]])
    octaves = expand_octaves(RISING_COSTS, RISING_COSTS)
    scale = pick_test_scale(scales, scales, make_costs(5, 12), octaves, fmt=fmt)
    expected = scales * torch.tensor([[2 ** (5 / 16)], [2 ** (12 / 16)]])
    torch.testing.assert_close(scale, expected)
    # If all costs are zero, as without queries, the smallest scale is chosen.
    zero_costs = torch.zeros(SEARCH_STEPS, 2, 1).double()
    assert pick_test_scale(scales, scales, zero_costs, octaves).equal(scales)
    # One scale for a whole layer is a scalar.
    costs = make_costs(7), expand_octaves(RISING_COSTS)
    scale = pick_test_scale(scales[:1], scales[:1], *costs, granularity="tensor")
    torch.testing.assert_close(scale, torch.tensor(0.5 * 2 ** (7 / 16)))


@pytest.mark.parametrize(
    ("far_scale", "octave_costs", "num_octaves"),
    [
        (100.0, FLAT_COSTS, 3),
        (1.0, FLAT_COSTS, 0),
        (1.5, FLAT_COSTS, 1),
        (2.0, FLAT_COSTS, 1),
        (3.0, FLAT_COSTS, 2),
        (100.0, RISING_COSTS, 0),
        (100.0, torch.tensor([1.0, 1.01, 1.5, 1.5]), 1),
        (100.0, torch.tensor([1.0, 1.5, 1.01, 1.01]), 0),
        (100.0, torch.tensor([1.0, 1.01, 1.5, 1.01]), 1),
        (100.0, torch.tensor([1.0, 1.015, 1.015, 1.1]), 2),
    ],
)
def test_a_scale_grows_to_the_far_scale_if_it_costs_nothing(far_scale, octave_costs, num_octaves):
    """A scale grows only until it covers `far_scale`, and never past an octave that adds a cost."""
    scale = pick_test_scale(
        torch.ones(2, 1), torch.tensor([[far_scale], [1.0]]), make_costs(0, 0),
        expand_octaves(octave_costs.double(), FLAT_COSTS),
    )  # fmt: skip
    assert scale.flatten().tolist() == [2.0**num_octaves, 1.0]


def test_higher_octaves_are_compared_at_the_chosen_step():
    octave_costs = expand_octaves(RISING_COSTS)
    octave_costs[:, 5] = 1.0
    ones = torch.ones(1, 1)
    assert pick_test_scale(ones, 100 * ones, make_costs(5), octave_costs) > 8
    assert pick_test_scale(ones, 100 * ones, make_costs(6), octave_costs) < 2


def test_scales_do_not_grow_if_small_values_would_become_subnormal():
    """One large value makes all smaller values subnormal in E3M4, but not in E4M3."""
    x = 0.004 * torch.randn(64, 1, 64)
    x[0, 0, 0] = 1.0
    octaves = {}
    for fmt in (E4M3, E3M4):
        min_scale = (x.abs().amax() / fmt.max).view(1, 1)
        candidate = make_candidate("k", min_scale, 100 * min_scale, fmt=fmt)
        costs = measure_costs(candidate, x, None)
        assert (costs[0] == 0).all()
        scale = pick_scale(candidate, costs)
        octaves[fmt.name] = (scale * fmt.scale_from_e4m3 / min_scale).item()
    assert octaves == {"fp8_e4m3": pytest.approx(8.0), "fp8_e3m4": pytest.approx(1.0)}


# -- candidates ------------------------------------------------------------------------------------


@pytest.fixture
def states_and_partner() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a biased K, a V with a different head size, and the paired channels of K."""
    k = torch.randn(20, NUM_HEADS, DIM) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 5.0
    return k, torch.randn(20, NUM_HEADS, 6), torch.tensor([2, 1, 0, 3])


def compute_pair_norms(k: torch.Tensor) -> torch.Tensor:
    """Return norms of pairs, `[Hkv, D]`. Channels 0 and 2 are a pair, and 1 and 3 are single."""
    norms = k.abs().clone()
    for channel in (0, 2):
        norms[..., channel] = (k[..., 0] ** 2 + k[..., 2] ** 2).sqrt()
    return norms.amax(0)


def list_candidates(ranges, partner, options, near_range=None, far_range=None):
    return choose.list_candidates(
        0, ranges, Partners(partner), options, near_range, far_range, may_rotate=False
    )


def find_first_candidates(k, v, partner, granularity, *, margin=1.0, center=True, fmt=E4M3):
    """Return the first candidates of K and V by side, and the centered candidate of K, if any."""
    options = CalibrationOptions(granularity, fmt, margin, center)
    candidates = list_candidates(measure_range(k, v, partner, None), partner, options)
    assert {c.fmt for side_candidates in candidates.values() for c in side_candidates} == {fmt}
    centered = {"k_centered": candidates["k"][1]} if candidates["k"][1:] else {}
    return {side: side_candidates[0] for side, side_candidates in candidates.items()} | centered


@pytest.mark.parametrize("fmt", [E4M3, E3M4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("margin", [1.0, 1.5])
@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_candidates_cover_near_and_far_values(states_and_partner, granularity, margin, fmt):
    k, v, partner = states_and_partner
    candidates = find_first_candidates(k, v, partner, granularity, margin=margin, fmt=fmt)
    dims = {"tensor": (0, 1), "head": (1,), "channel": ()}[granularity]
    mean = k.double().mean(0).float()
    expected = {
        "k": (k.abs().amax(0), compute_pair_norms(k), None),
        "v": (v.abs().amax(0), v.abs().amax(0), None),
        "k_centered": ((k - mean).abs().amax(0), compute_pair_norms(k) + mean.abs(), mean),
    }
    assert candidates.keys() == expected.keys()
    for name, (near_amax, far_amax, center) in expected.items():
        amax = far_amax if granularity == "channel" else near_amax
        if dims:
            amax, far_amax = (x.amax(dims, keepdim=True) for x in (amax, far_amax))
        candidate = candidates[name]
        torch.testing.assert_close(candidate.min_scale * fmt.max, amax * margin)
        torch.testing.assert_close(candidate.far_scale * fmt.max, far_amax * margin)
        assert (candidate.center is None) == (center is None)
        if center is not None:
            torch.testing.assert_close(candidate.center, center)


def test_a_center_is_a_candidate_only_if_requested(states_and_partner):
    assert find_first_candidates(*states_and_partner, "head", center=False).keys() == {"k", "v"}


def test_keys_have_no_scale_per_channel_if_pairs_are_unknown(states_and_partner):
    k, v, _ = states_and_partner
    candidates = find_first_candidates(k, v, None, "channel")
    assert candidates["k"].min_scale.shape == (NUM_HEADS, 1)
    assert candidates["k_centered"].min_scale.shape == (NUM_HEADS, 1)
    assert candidates["v"].min_scale.shape == v.shape[1:]


# -- choice on a model -----------------------------------------------------------------------------


def call_with_queries(model, batch, on_layer):
    observe_queries(model, batch, find_paged_layers(model), on_layer)


def make_job(model, *, center=False) -> Job:
    options = CalibrationOptions("head", E4M3, 1.0, center)
    return Job(model, find_paged_layers(model), options, tqdm(disable=True))


@pytest.fixture(scope="module")
def sliding_model():
    """Return a model in which all layers attend to 8 tokens."""
    return build_variant("mistral")[0]


def make_random_windows(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def observe_kv(model, window: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    call_with_queries(model, Batch((window,)), lambda i, k, v, _: states.update({i: (k, v)}))
    return states


# Full attention and windows, an unusual scaling, and fewer or more tokens than queries.
@pytest.mark.parametrize(
    ("name", "config", "num_tokens", "window"),
    [
        ("mistral", {}, 30, 8),
        ("mistral", {}, 100, 8),
        ("llama", {}, 100, 100),
        ("gemma3_text", {"query_pre_attn_scalar": 7}, 100, 100),
    ],
)
def test_queries_match_the_attention_of_the_model(name, config, num_tokens, window):
    """Queries are from the last three quarters. Their weights are rows of the model's attention."""
    model, (ids,) = build_variant(name, **config)[0], make_random_windows(num_tokens)
    calls: list[Queries] = []
    batch = Batch((ids,))
    call_with_queries(model, batch, lambda i, k, v, queries: calls.append(queries))
    eager = build_variant(name, attn_implementation="eager", **config)[0]
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attention = eager(input_ids=ids[None], output_attentions=True).attentions
    assert len(calls) == len(attention)
    positions = torch.linspace(num_tokens // 4, num_tokens - 1, min(64, num_tokens)).long()
    assert (positions[0], positions[-1]) == (num_tokens // 4, num_tokens - 1)
    num_attended = []
    for weights, call in zip(attention, calls, strict=True):
        expected = weights[0][:, positions]
        num_attended.append((expected > 0).sum(-1).max())
        torch.testing.assert_close(call.weights.view_as(expected), expected, rtol=1e-3, atol=1e-5)
    assert max(num_attended) == window


def test_a_batch_of_several_texts_has_no_queries(sliding_model):
    calls: list[Queries | None] = []
    batch = Batch(tuple(make_random_windows(12, 9)))
    call_with_queries(sliding_model, batch, lambda i, k, v, queries: calls.append(queries))
    assert calls == [None, None]


def choose_scales(model, windows):
    """Return the chosen scales and the candidates of each layer."""
    job = make_job(model)
    partners = measure_partners(model, windows[0], job.layers)
    ranges = stages.collect_ranges(job, "text", [Batch((window,)) for window in windows], partners)
    candidates = {i: list_candidates(r, partners[i].k, job.options) for i, r in ranges.items()}
    scales = choose.make_scales(job, windows, candidates)
    return choose.choose_scales(job, windows, FarPositions(0), scales, "a text")[0], candidates


@pytest.mark.parametrize("num_windows", [3, 20])
def test_costs_are_summed_over_all_sampled_windows(sliding_model, num_windows):
    windows = make_random_windows(*range(20, 20 + num_windows))
    chosen_scales, candidates = choose_scales(sliding_model, windows)
    assert stages.MAX_SAMPLE_WINDOWS == 8  # as docs/calibrate.md says
    batches = make_batches(stages.sample_windows(windows), 1)
    lengths = {batch.num_tokens for batch in batches}
    assert len(lengths) == len(batches) == min(num_windows, 8)
    # The sample covers the whole list, not only the first eight windows.
    assert max(lengths) - min(lengths) >= min(num_windows - 1, 14)
    sums: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}}

    def add_costs(index, k, v, queries):
        assert queries is not None
        for side, x in (("k", k), ("v", v)):
            cost = measure_costs(candidates[index][side][0], x, queries)
            sums[index][side] = sums[index].get(side, 0) + cost

    for batch in batches:
        call_with_queries(sliding_model, batch, add_costs)
    for index, layer in chosen_scales.items():
        assert layer.plan is None
        for side in "kv":
            expected = pick_scale(candidates[index][side][0], sums[index][side])
            assert getattr(layer, side).equal(expected)


def test_attention_without_queries_gets_the_smallest_scales(sliding_model, monkeypatch):
    no_queries = queries_module.nullcontext()
    monkeypatch.setattr(queries_module, "watched_attention", lambda *_: no_queries)
    windows = make_random_windows(20, 24)
    chosen_scales, _ = choose_scales(sliding_model, windows)
    states = [observe_kv(sliding_model, window) for window in windows]
    for index in chosen_scales:
        amax = torch.cat([x[index][1] for x in states]).abs().amax((0, 2))
        torch.testing.assert_close(chosen_scales[index].v, amax[:, None] / 448)


# -- centers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_model():
    return build_variant("llama")[0]


@pytest.mark.parametrize(
    ("gains", "is_accepted"),
    [
        # The comments give the mean of the gains, and twice the standard error.
        ([0.2, 0.2, 0.2, 0.2], True),
        ([-0.2, -0.2, -0.2, -0.2], False),
        ([0.0, 0.0, 0.0, 0.0], False),
        ([0.3, -0.1, 0.3, -0.1], False),  # 0.1, 0.23
        ([0.3, 0.05, 0.3, 0.05], True),  # 0.175, 0.144
        ([0.3, 0.02, 0.3, 0.02], False),  # 0.16, 0.162: between one and two standard errors
        ([-0.3, 0.3, -0.3, -0.3], False),
        ([0.3], False),
    ],
)
def test_a_center_needs_a_significant_gain(llama_model, monkeypatch, gains, is_accepted):
    ones, gain = torch.ones(len(gains)), torch.tensor(gains).double()

    def score(job, stage, batches, factories):
        scales = {name: make_cache() for name, make_cache in factories.items()}
        assert (scales["with"].centered, scales["without"].centered) == (True, False)
        return {"without": Scores(ones, ones, ones), "with": Scores(ones - gain, ones, ones)}

    monkeypatch.setattr(scoring, "score_caches", score)
    monkeypatch.setattr(scoring, "FP8PagedCache", lambda *_, scales, **kwargs: scales)
    layer_scales = LayerScales(ones[:1, None], ones[:1, None])
    centered_layer = LayerScales(layer_scales.k, layer_scales.v, torch.ones(1, 16))
    plain, centered = (KVScales({0: layer_scales, 1: x}) for x in (layer_scales, centered_layer))
    job = make_job(llama_model, center=True)
    windows = make_random_windows(24, 24)
    chosen_scales, reason = scoring.select_scales(job, windows, plain, centered, FarPositions(24))
    assert chosen_scales is (centered if is_accepted else plain)
    assert reason.startswith(
        "Centers in 1 of 2 layers: KL" if is_accepted else "No centers: the gain is uncertain"
    )


def make_sums(weights: list[float], weighted_sums: list[float]) -> dict[str, torch.Tensor]:
    sums = {"weight_sum": weights, "weighted_sum": weighted_sums}
    return {name: torch.tensor([values]).double() for name, values in sums.items()}


def test_the_center_is_the_weighted_mean_of_the_sample_and_its_scale_covers_it():
    ranges, far_range = (
        measure_range(k, k, torch.tensor([1, 0]), None)
        for k in (torch.tensor([[[4.0, 1.0]], [[6.0, 3.0]]]), torch.tensor([[[-4.0, 2.0]]]))
    )
    near_range = ranges | make_sums([1.0, 1.0], [6.0, 1.5])
    far_range |= make_sums([3.0, 1.0], [-18.0, 3.5])
    options = CalibrationOptions("head", E4M3, 1.0, True)
    default_candidates, near_candidates, far_candidates = (
        list_candidates(ranges, None, options, *sample)["k"]
        for sample in ((), (near_range,), (near_range, far_range))
    )
    assert [candidate.center.tolist() for candidate in default_candidates[1:]] == [[[5.0, 2.0]]]
    (window_center,), (weighted_center, even_center) = near_candidates[1:], far_candidates[1:]
    torch.testing.assert_close(window_center.center, torch.tensor([[6.0, 1.5]]))
    torch.testing.assert_close(weighted_center.center, torch.tensor([[-3.0, 2.5]]))
    # The mean over the windows has a weight of one ninth.
    torch.testing.assert_close(even_center.center, torch.tensor([[-3.0, 2.0]]))
    # The range is from the center, -3, to 6, which occurs only at near positions.
    for candidate in (weighted_center, even_center):
        assert candidate.min_scale.item() == pytest.approx(9 / 448, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 8.0])
def test_a_channel_without_attention_has_the_plain_mean_as_center(weight):
    k = torch.tensor([[[1.0, 3.0]], [[5.0, 5.0]]])
    ranges = measure_range(k, k, None, None)
    sample = ranges | make_sums([0.0, weight], [0.0, 4.5 * weight])
    (center,), _ = find_centers(ranges, sample, None)
    expected = torch.tensor([[3.0, 4.5 if weight else 4.0]])
    torch.testing.assert_close(center, expected, rtol=1e-5, atol=0)


def test_the_weight_of_a_value_of_k_is_the_cost_of_its_error(states):
    q, k = states
    queries = Queries.from_states(q, k, POSITIONS, 0.5, 3)
    sums = weigh_keys(k, queries)
    expected = {name: torch.zeros(NUM_HEADS, DIM, dtype=torch.float64) for name in sums}
    for n in range(NUM_TOKENS):
        error = torch.zeros_like(k)
        error[n] = 2.0
        cost = queries.compute_cost("k", error, "channel").double() / 4
        expected["weight_sum"] += cost
        expected["weighted_sum"] += cost * k[n]
    for name, weight in sums.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)
    unweighted_sums = weigh_keys(k, None)
    assert (unweighted_sums["weight_sum"] == NUM_TOKENS).all()
    torch.testing.assert_close(unweighted_sums["weighted_sum"], k.sum(0).double())


def test_sums_of_a_sample_are_weighted_by_the_queries_of_the_model(llama_model):
    job, windows = make_job(llama_model, center=True), make_random_windows(24, 24, 24)
    batches = make_batches(stages.sample_windows(windows), 1)
    partners = measure_partners(llama_model, windows[0], job.layers)
    sample = stages.collect_ranges(job, "sample", batches, partners, observe_queries)
    weighted_sums: dict[int, list[torch.Tensor]] = {index: [] for index in sample}

    def add_sum(index, k, v, queries):
        weighted_sums[index].append(weigh_keys(k, queries)["weighted_sum"])

    for batch in batches:
        call_with_queries(llama_model, batch, add_sum)
    states = [observe_kv(llama_model, window) for window in windows]
    for index, sums in sample.items():
        k = torch.cat([x[index][0] for x in states])
        assert sums["count"] == len(k) == 72
        torch.testing.assert_close(sums["k_max"], k.amax(0))
        torch.testing.assert_close(sums["weighted_sum"], sum(weighted_sums[index]))


# -- partners --------------------------------------------------------------------------------------


def test_partners_must_choose_each_other():
    """Channel 1 changes oppositely to channel 0, but more exactly oppositely to channel 2."""
    change = torch.randn(4096, dtype=torch.float64)
    noise = torch.randn(2, 4096, dtype=torch.float64)
    changes = [-change + 0.5 * noise[0], change, -change, noise[1]]
    base = torch.full((4096, 4), 20.0, dtype=torch.float64)
    rotated = base + torch.stack(changes, 1) * 3.0
    # The changes are so large that all channels count as rotated.
    near_norms, far_norms = ((x - 10.0).clamp(min=0.1).sqrt()[:, None] for x in (base, rotated))
    assert match_channels(near_norms, far_norms).tolist() == [0, 2, 1, 3]
