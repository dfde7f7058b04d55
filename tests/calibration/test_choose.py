"""How scales are chosen: what errors cost, which scale costs least, and whether centers help.

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
from hf_fp8kv.calibration.rope import Beyond, Partners, match_channels, measure_partners
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
def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of random numbers."""
    return torch.randn(HEADS * GROUP, len(AT), DIM), torch.randn(TOKENS, HEADS, DIM)


def naive_cost(side: str, queries: Queries, error: torch.Tensor) -> torch.Tensor:
    """`[Hkv, 1 + D]`, float64: what errors `[N, Hkv, D]` cost in a head, and in each channel."""
    w, e = queries.weights.double(), error.double().transpose(0, 1)[:, None]
    mean = (w[..., None] * e).sum(-2)
    if side == "v":
        each = mean.square()
        whole = each.sum(-1, keepdim=True)
    else:
        q = queries.q.double()
        moved = (q[..., None, :] * e).sum(-1)
        middle = (w * moved).sum(-1, keepdim=True)
        whole = (w * (moved - middle) ** 2).sum(-1, keepdim=True)
        each = q**2 * (w[..., None] * (e - mean[..., None, :]) ** 2).sum(-2)
    return torch.cat([whole, each], -1).sum(1)


# -- queries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "scaling", "at"),
    [(None, 1.0, [2, 4, 6]), (1, 0.3, [2, 4, 6]), (3, 1.0, [6, 0, 3]), (100, 0.3, [6, 0, 3])],
)
def test_what_queries_attend_to(numbers, window, scaling, at):
    """Queries may be in any order."""
    (q, k), at = numbers, torch.tensor(at)
    found = Queries.from_states(q, k, at, scaling, window)
    dots = torch.einsum("hgqd,nhd->hgqn", q.view(HEADS, GROUP, -1, DIM), k).double() * scaling
    age = at[:, None] - torch.arange(TOKENS)
    hidden = (age < 0) | (age >= (window or TOKENS))
    expected = dots.masked_fill(hidden, -math.inf).softmax(-1)
    weights = found.weights.view_as(expected)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    assert (weights == 0).equal(expected == 0)
    torch.testing.assert_close(found.q.view_as(q), q * scaling)


def test_queries_of_other_keys_are_none(numbers):
    q, k = numbers
    assert Queries.from_states(q[:5], k, AT, 1.0, None) is None
    assert Queries.from_states(q[..., :3], k, AT, 1.0, None) is None


# -- what an error costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["k", "v"])
def test_cost_of_errors(numbers, side):
    q, k = numbers
    queries = Queries.from_states(q, k, AT, 1.0, None)
    error = torch.randn(TOKENS, HEADS, DIM) + 0.5
    expected = naive_cost(side, queries, error).float()
    for granularity in ("tensor", "head"):
        torch.testing.assert_close(queries.cost(side, error, granularity), expected[:, :1])
    torch.testing.assert_close(queries.cost(side, error, "channel"), expected[:, 1:])
    # Errors of V have a weight each: no head and no channel costs what another one does.
    assert len(set(expected.flatten().tolist())) == HEADS * (1 + DIM)


# -- what a scale costs ----------------------------------------------------------------------------


def stored(x: torch.Tensor, scale: torch.Tensor, fmt) -> torch.Tensor:
    """What is read back of `x`, by the specification."""
    return decode(encode(x / scale, fmt), fmt) * scale


FIRST = {
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
def test_cost_of_scales(numbers, side, granularity):
    """Every scale of an octave, minus the center; heads and channels as the scales have them."""
    q, k = numbers
    queries = Queries.from_states(q, k, AT, 1.0, None)
    center = torch.randn(HEADS, DIM) if side == "k" and granularity != "tensor" else None
    tried = candidate(side, FIRST[granularity], center=center, granularity=granularity, fmt=E3M4)
    found = measure_costs(tried, k, queries)
    x = k if center is None else k - center
    for step in range(SEARCH_STEPS):
        scale = FIRST[granularity] * 2 ** (step / SEARCH_STEPS)
        error = stored(x, scale, E3M4) - x
        each = naive_cost(side, queries, error)
        # A candidate costs what its heads cost.
        for seen_by, cost in ((queries, each[:, 0].sum()), (None, error.double().square().sum())):
            whole = tried.measure(k, seen_by, scale / E3M4.scale_from_e4m3).sum().double()
            torch.testing.assert_close(whole, cost, rtol=1e-3, atol=1e-9)
        expected = each[:, 1:] if granularity == "channel" else each[:, :1]
        if granularity == "tensor":
            expected = expected.sum(0, keepdim=True)
        torch.testing.assert_close(found[0, step], expected, rtol=1e-3, atol=1e-9)
        for octave in range(4):
            larger = scale * 2**octave
            square = (stored(x, larger, E3M4) - x).double().square()
            expected = square.sum(SUMS[granularity], keepdim=True)[0]
            torch.testing.assert_close(found[1 + octave, step], expected)
    assert found.dtype == torch.float64


def test_room_is_tried_on_tokens_of_the_whole_text():
    """The last of 384 tokens that are looked at is near the end; the others are zeros."""
    x = torch.zeros(3 * 128, 1, 4)
    x[-3] = 0.3
    assert measure_costs(candidate("v", torch.ones(1, 1)), x, None)[1, 1] > 0


# -- the choice ------------------------------------------------------------------------------------


def choice_of(first, reach, cost, room, *, granularity="head", fmt=E4M3) -> torch.Tensor:
    """The scales that are taken, in the unit of the format."""
    tried = candidate("v", first, reach, granularity=granularity, fmt=fmt)
    return pick_scale(tried, torch.cat([cost[None], room])) * fmt.scale_from_e4m3


def least_at(*steps: int) -> torch.Tensor:
    """Costs `[16, len(steps), 1]`, least at a step of each head and largest at another one."""
    cost = torch.full((SEARCH_STEPS, len(steps), 1), 5.0).double()
    for head, step in enumerate(steps):
        cost[step, head] = 1.0
        cost[(step + 3) % SEARCH_STEPS, head] = 9.0
    return cost


NO_ROOM = torch.tensor([1.0, 2.0, 2.0, 2.0]).double()


def rooms(*heads: torch.Tensor) -> torch.Tensor:
    """`[4, 16, H, 1]` of one `[4]` for each head: the same for every step."""
    return torch.stack(heads, 1)[:, None, :, None].expand(-1, SEARCH_STEPS, -1, -1).clone()


@pytest.mark.parametrize("fmt", [E4M3, E3M4], ids=lambda fmt: fmt.name)
def test_the_scale_that_costs_least(fmt):
    first = torch.tensor([[0.5], [3.0]])
    found = choice_of(first, first, least_at(5, 12), rooms(NO_ROOM, NO_ROOM), fmt=fmt)
    expected = first * torch.tensor([[2 ** (5 / 16)], [2 ** (12 / 16)]])
    torch.testing.assert_close(found, expected)
    # Without queries nothing costs anything: the smallest scale.
    nothing = torch.zeros(SEARCH_STEPS, 2, 1).double()
    assert choice_of(first, first, nothing, rooms(NO_ROOM, NO_ROOM)).equal(first)
    # One scale for a layer is a scalar.
    one = first[:1]
    found = choice_of(one, one, least_at(7), rooms(NO_ROOM), granularity="tensor")
    torch.testing.assert_close(found, torch.tensor(0.5 * 2 ** (7 / 16)))


FREE = torch.ones(4).double()


@pytest.mark.parametrize(
    ("reach", "room", "octaves"),
    [
        (100.0, FREE, 3),
        (1.0, FREE, 0),
        (1.5, FREE, 1),
        (2.0, FREE, 1),
        (3.0, FREE, 2),
        (100.0, NO_ROOM, 0),
        (100.0, torch.tensor([1.0, 1.01, 1.5, 1.5]), 1),
        (100.0, torch.tensor([1.0, 1.5, 1.01, 1.01]), 0),
        (100.0, torch.tensor([1.0, 1.01, 1.5, 1.01]), 1),
        (100.0, torch.tensor([1.0, 1.015, 1.015, 1.1]), 2),
    ],
)
def test_room_where_it_costs_nothing_and_up_to_reach(reach, room, octaves):
    """Never an octave further than what covers `reach`, nor one past an octave that costs."""
    found = choice_of(
        torch.ones(2, 1), torch.tensor([[reach], [1.0]]), least_at(0, 0),
        rooms(room.double(), FREE),
    )  # fmt: skip
    assert found.flatten().tolist() == [2.0**octaves, 1.0]


def test_room_is_that_of_the_scale_that_is_taken():
    room = rooms(NO_ROOM)
    room[:, 5] = 1.0
    one = torch.ones(1, 1)
    assert choice_of(one, 100 * one, least_at(5), room) > 8
    assert choice_of(one, 100 * one, least_at(6), room) < 2


def test_room_is_not_taken_of_small_numbers():
    """One number is large; the others are then subnormal in E3M4, and far from it in E4M3."""
    x = 0.004 * torch.randn(64, 1, 64)
    x[0, 0, 0] = 1.0
    taken = {}
    for fmt in (E4M3, E3M4):
        first = (x.abs().amax() / fmt.max).view(1, 1)
        tried = candidate("k", first, 100 * first, fmt=fmt)
        found = measure_costs(tried, x, None)
        assert (found[0] == 0).all()
        scale = pick_scale(tried, found)
        taken[fmt.name] = (scale * fmt.scale_from_e4m3 / first).item()
    assert taken == {"fp8_e4m3": pytest.approx(8.0), "fp8_e3m4": pytest.approx(1.0)}


# -- what is tried ---------------------------------------------------------------------------------


@pytest.fixture
def ranges() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K with a bias, V of another head size, and K's partners."""
    k = torch.randn(20, HEADS, DIM) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 5.0
    return k, torch.randn(20, HEADS, 6), torch.tensor([2, 1, 0, 3])


def pair_norm(k: torch.Tensor) -> torch.Tensor:
    """`[Hkv, D]`: channels 0 and 2 are a pair, 1 and 3 are alone."""
    found = k.abs().clone()
    for channel in (0, 2):
        found[..., channel] = (k[..., 0] ** 2 + k[..., 2] ** 2).sqrt()
    return found.amax(0)


def listed(ranges, partner, options, *near_and_far) -> dict[str, list[Candidate]]:
    near, far = (*near_and_far, None, None)[:2]
    return choose.list_candidates(0, ranges, Partners(partner), options, near, far, may_turn=False)


def tried_of(k, v, partner, granularity, *, margin=1.0, center=True, fmt=E4M3):
    options = CalibrationOptions(granularity, fmt, margin, center)
    found = listed(measure_range(k, v, partner, None), partner, options)
    assert {c.fmt for of_side in found.values() for c in of_side} == {fmt}
    centered = {"k_centered": found["k"][1]} if found["k"][1:] else {}
    return {side: of_side[0] for side, of_side in found.items()} | centered


@pytest.mark.parametrize("fmt", [E4M3, E3M4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("margin", [1.0, 1.5])
@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_the_smallest_scales_and_how_far_they_may_grow(ranges, granularity, margin, fmt):
    k, v, partner = ranges
    found = tried_of(k, v, partner, granularity, margin=margin, fmt=fmt)
    over = {"tensor": (0, 1), "head": (1,), "channel": ()}[granularity]
    mean = k.double().mean(0).float()
    expected = {
        "k": (k.abs().amax(0), pair_norm(k), None),
        "v": (v.abs().amax(0), v.abs().amax(0), None),
        "k_centered": ((k - mean).abs().amax(0), pair_norm(k) + mean.abs(), mean),
    }
    assert found.keys() == expected.keys()
    for name, (amax, reach, center) in expected.items():
        first = reach if granularity == "channel" else amax
        if over:
            first, reach = (x.amax(over, keepdim=True) for x in (first, reach))
        tried = found[name]
        torch.testing.assert_close(tried.first * fmt.max, first * margin)
        torch.testing.assert_close(tried.reach * fmt.max, reach * margin)
        assert (tried.center is None) == (center is None)
        if center is not None:
            torch.testing.assert_close(tried.center, center)


def test_a_center_only_where_it_is_wanted(ranges):
    assert tried_of(*ranges, "head", center=False).keys() == {"k", "v"}


def test_k_has_no_scale_of_channels_where_pairs_are_not_known(ranges):
    k, v, _ = ranges
    found = tried_of(k, v, None, "channel")
    assert found["k"].first.shape == found["k_centered"].first.shape == (HEADS, 1)
    assert found["v"].first.shape == v.shape[1:]


# -- on a model ------------------------------------------------------------------------------------


def see_queries(job, batch, on_layer):
    observe_queries(job.model, batch, job.layers, on_layer)


def job_of(model, *, center=False) -> Job:
    options = CalibrationOptions("head", E4M3, 1.0, center)
    return Job(model, paged_layers(model), options, tqdm(disable=True))


@pytest.fixture(scope="module")
def sliding():
    """Every layer sees 8 tokens."""
    return tiny("mistral")[0]


def windows_of(*lengths: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=chance) for length in lengths]


def shown(model, window: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    observe(model, Batch((window,)), paged_layers(model), lambda i, k, v: found.update({i: (k, v)}))
    return found


# Grid: windows and full attention, an unusual scaling, fewer tokens than queries and more.
@pytest.mark.parametrize(
    ("name", "more", "tokens", "window"),
    [
        ("mistral", {}, 30, 8),
        ("mistral", {}, 100, 8),
        ("llama", {}, 100, 100),
        ("gemma3_text", {"query_pre_attn_scalar": 7}, 100, 100),
    ],
)
def test_the_queries_are_those_of_the_model(name, more, tokens, window):
    """They lie in the last three quarters. Their weights are rows of the model's attention."""
    model, (ids,) = tiny(name, **more)[0], windows_of(tokens)
    calls: list[Queries] = []
    batch = Batch((ids,))
    see_queries(job_of(model), batch, lambda i, k, v, queries: calls.append(queries))
    eager = tiny(name, attn_implementation="eager", **more)[0]
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attention = eager(input_ids=ids[None], output_attentions=True).attentions
    assert len(calls) == len(attention)
    at = torch.linspace(tokens // 4, tokens - 1, min(64, tokens)).long()
    assert (at[0], at[-1]) == (tokens // 4, tokens - 1)
    seen_by = []
    for of_layer, call in zip(attention, calls, strict=True):
        expected = of_layer[0][:, at]
        seen_by.append((expected > 0).sum(-1).max())
        torch.testing.assert_close(call.weights.view_as(expected), expected, rtol=1e-3, atol=1e-5)
    assert max(seen_by) == window


def test_queries_of_several_texts_are_none(sliding):
    found: list[Queries | None] = []
    batch = Batch(tuple(windows_of(12, 9)))
    see_queries(job_of(sliding), batch, lambda i, k, v, queries: found.append(queries))
    assert found == [None, None]


def chosen_on(model, windows) -> tuple[dict[int, LayerScales], dict[int, choose.Sides]]:
    """What scales are made, and of what."""
    job = job_of(model)
    partners = measure_partners(model, windows[0], job.layers)
    ranges = stages.collect_ranges(job, "text", [Batch((w,)) for w in windows], partners)
    tried = {i: listed(of_layer, partners[i].k, job.options) for i, of_layer in ranges.items()}
    made = choose.make_scales(job, windows, tried)
    return choose.choose_scales(job, windows, Beyond(0), made, "a text")[0], tried


@pytest.mark.parametrize("count", [3, 20])
def test_every_window_that_is_tried_counts(sliding, count):
    windows = windows_of(*range(20, 20 + count))
    found, tried = chosen_on(sliding, windows)
    assert stages.SAMPLE_WINDOWS == 8  # as docs/calibrate.md says
    batches = make_batches(stages.sample_windows(windows), 1)
    lengths = {batch.tokens for batch in batches}
    assert len(lengths) == len(batches) == min(count, 8)
    # From all over the list, not the first eight.
    assert max(lengths) - min(lengths) >= min(count - 1, 14)
    sums: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}}

    def add(index, k, v, queries):
        assert queries is not None
        for side, x in (("k", k), ("v", v)):
            cost = measure_costs(tried[index][side][0], x, queries)
            sums[index][side] = sums[index].get(side, 0) + cost

    for batch in batches:
        see_queries(job_of(sliding), batch, add)
    for index, layer in found.items():
        assert layer.plan is None
        for side in "kv":
            expected = pick_scale(tried[index][side][0], sums[index][side])
            assert getattr(layer, side).equal(expected)


def test_attention_that_shows_no_queries_gets_the_smallest_scales(sliding, monkeypatch):
    monkeypatch.setattr(queries, "watched_attention", lambda *_: queries.nullcontext())
    windows = windows_of(20, 24)
    found, _ = chosen_on(sliding, windows)
    for index in found:
        amax = torch.cat([shown(sliding, w)[index][1] for w in windows]).abs().amax((0, 2))
        torch.testing.assert_close(found[index].v, amax[:, None] / 448)


# -- centers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")[0]


@pytest.mark.parametrize(
    ("less", "helps"),
    [
        # The mean of what is less, and two standard errors of it.
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
def test_a_center_must_help_for_certain(llama, monkeypatch, less, helps):
    one, kl = torch.ones(len(less)), torch.tensor(less).double()

    def scored(job, name, batches, caches):
        made = {name: make() for name, make in caches.items()}
        assert (made["with"].centered, made["without"].centered) == (True, False)
        return {"without": Scores(one, one, one), "with": Scores(one - kl, one, one)}

    monkeypatch.setattr(scoring, "score_caches", scored)
    monkeypatch.setattr(scoring, "FP8PagedCache", lambda *_, scales, **more: scales)
    plain = LayerScales(one[:1, None], one[:1, None])
    centered = LayerScales(plain.k, plain.v, torch.ones(1, 16))
    safe, best = KVScales({0: plain, 1: plain}), KVScales({0: plain, 1: centered})
    job = job_of(llama, center=True)
    found, why = scoring.check_plans(job, windows_of(24, 24), safe, best, Beyond(24))
    assert found is (best if helps else safe)
    assert why.startswith(
        "Centers in 1 of 2 layers: KL" if helps else "No centers: the gain is uncertain"
    )


def sums_of(weight: list[float], weighted: list[float]) -> dict[str, torch.Tensor]:
    names = ("weight_sum", "weighted_sum")
    return {n: torch.tensor([x]).double() for n, x in zip(names, (weight, weighted), strict=True)}


def test_the_center_is_the_weighted_mean_of_the_sample_and_its_scale_covers_it():
    ranges, far = (
        measure_range(k, k, torch.tensor([1, 0]), None)
        for k in (torch.tensor([[[4.0, 1.0]], [[6.0, 3.0]]]), torch.tensor([[[-4.0, 2.0]]]))
    )
    near = ranges | sums_of([1.0, 1.0], [6.0, 1.5])
    far |= sums_of([3.0, 1.0], [-18.0, 3.5])
    options = CalibrationOptions("head", E4M3, 1.0, True)
    alone, windows, both = (
        listed(ranges, None, options, *of)["k"] for of in ((), (near,), (near, far))
    )
    assert [tried.center.tolist() for tried in alone[1:]] == [[[5.0, 2.0]]]
    (of_windows,), (weighted, evenly) = windows[1:], both[1:]
    torch.testing.assert_close(of_windows.center, torch.tensor([[6.0, 1.5]]))
    torch.testing.assert_close(weighted.center, torch.tensor([[-3.0, 2.5]]))
    # A ninth of it is the mean of the windows.
    torch.testing.assert_close(evenly.center, torch.tensor([[-3.0, 2.0]]))
    # From the center, -3, to 6, which only the near text has.
    for tried in (weighted, evenly):
        assert tried.first.item() == pytest.approx(9 / 448, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 8.0])
def test_a_channel_that_nobody_looks_at_has_the_plain_mean_as_center(weight):
    k = torch.tensor([[[1.0, 3.0]], [[5.0, 5.0]]])
    ranges = measure_range(k, k, None, None)
    sample = ranges | sums_of([0.0, weight], [0.0, 4.5 * weight])
    (center,), _ = find_centers(ranges, sample, None)
    expected = torch.tensor([[3.0, 4.5 if weight else 4.0]])
    torch.testing.assert_close(center, expected, rtol=1e-5, atol=0)


def test_a_number_of_k_weighs_what_an_error_of_it_alone_costs(numbers):
    q, k = numbers
    queries = Queries.from_states(q, k, AT, 0.5, 3)
    sums = weigh_keys(k, queries)
    expected = {name: torch.zeros(HEADS, DIM, dtype=torch.float64) for name in sums}
    for n in range(TOKENS):
        error = torch.zeros_like(k)
        error[n] = 2.0
        cost = queries.cost("k", error, "channel").double() / 4
        expected["weight_sum"] += cost
        expected["weighted_sum"] += cost * k[n]
    for name, found in sums.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6)
    alike = weigh_keys(k, None)
    assert (alike["weight_sum"] == TOKENS).all()
    torch.testing.assert_close(alike["weighted_sum"], k.sum(0).double())


def test_a_sample_is_weighed_by_the_queries_of_the_model(llama):
    job, windows = job_of(llama, center=True), windows_of(24, 24, 24)
    batches = make_batches(stages.sample_windows(windows), 1)
    partners = measure_partners(llama, windows[0], job.layers)
    sample = stages.collect_ranges(job, "sample", batches, partners, observe_queries)
    weighed: dict[int, list[torch.Tensor]] = {index: [] for index in sample}

    def weigh(index, k, v, queries):
        weighed[index].append(weigh_keys(k, queries)["weighted_sum"])

    for batch in batches:
        see_queries(job, batch, weigh)
    for index, of_layer in sample.items():
        k = torch.cat([shown(llama, window)[index][0] for window in windows])
        assert of_layer["count"] == len(k) == 72
        torch.testing.assert_close(of_layer["k_max"], k.amax(0))
        torch.testing.assert_close(of_layer["weighted_sum"], sum(weighed[index]))


# -- partners --------------------------------------------------------------------------------------


def test_partners_must_choose_each_other():
    """The changes of channel 0 go against those of 1, but those of 2 do more so."""
    change = torch.randn(4096, dtype=torch.float64)
    noise = torch.randn(2, 4096, dtype=torch.float64)
    changes = [-change + 0.5 * noise[0], change, -change, noise[1]]
    base = torch.full((4096, 4), 20.0, dtype=torch.float64)
    after = base + torch.stack(changes, 1) * 3.0
    # So large a share moves that all of them count as rotated.
    here, there = ((x - 10.0).clamp(min=0.1).sqrt()[:, None] for x in (base, after))
    assert match_channels(here, there).tolist() == [0, 2, 1, 3]
