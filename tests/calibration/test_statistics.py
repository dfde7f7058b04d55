"""What a calibration says of scales, which run it is, and how one that was killed goes on."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_fp8kv import ConfigError, KVScales, calibrate
from hf_fp8kv.calibration import statistics as module
from hf_fp8kv.calibration.choose import CalibrationOptions
from hf_fp8kv.calibration.observe import Batch, measure_range, merge_ranges
from hf_fp8kv.calibration.positions import limit_length
from hf_fp8kv.calibration.state import Job, State
from hf_fp8kv.calibration.statistics import head_amax, measure_statistics
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.formats.codec import decode, dynamic_scale, encode, search_scale
from hf_fp8kv.scales.layer_scales import LayerScales
from tests.helpers.tiny_models import VOCAB, tiny

pytestmark = pytest.mark.text

HEADS = 2
AMAX = {"k": (1.0, 2.0), "v": (3.0, 4.0)}
# What a number of each format must pass to be cut off: half a step above the largest.
OVER = {
    "fp8_e4m3": 464.0, "fp8_e5m2": 61440.0, "fp8_e3m4": 31.5, "fp8_e4m3fnuz": 248.0,
    "fp8_e2m5": 7.9375, "int8": 127.5,
}  # fmt: skip


def found_of(monkeypatch, texts, scales: LayerScales, fmt="fp8_e4m3"):
    """The statistics of one layer whose K and V are `texts`, a list of pairs `[N, Hkv, D]`."""
    left = iter(texts)

    def observe(model, batch, layers, seen):
        seen(0, *next(left))

    monkeypatch.setattr(module, "observe", observe)
    options = CalibrationOptions("head", FORMATS[fmt], 1.0, False)
    job = Job(None, frozenset({0}), options, State(None, ""), lambda *_: None)
    batches = [Batch((torch.zeros(len(k), dtype=torch.int64),)) for k, _ in texts]
    return measure_statistics(job, batches, {0: scales}, {0: AMAX})[0]


def of(k: object, v: object, center: torch.Tensor | None = None) -> LayerScales:
    return LayerScales(torch.as_tensor(k), torch.as_tensor(v), center)


def filled(*numbers: float) -> torch.Tensor:
    """`[N, 2, 1]`, the same for both heads."""
    return torch.tensor(numbers)[:, None, None].expand(-1, HEADS, 1).clone()


# -- what saturates, and what vanishes -------------------------------------------------------------


@pytest.mark.parametrize("name", list(OVER))
def test_saturated_is_what_is_cut_off_in_this_format(monkeypatch, name):
    """One number of four is past the largest, in numbers as the scale's format holds them."""
    scale, fmt = 0.25, FORMATS[name]
    unit = scale * fmt.scale_from_e4m3
    edge = OVER[name]
    k = filled(0.999 * edge, -fmt.max, 1.001 * edge, 1.0) * unit
    v = filled(-1.001 * edge, 1.001 * edge, 0.0, 0.9 * edge) * unit
    found = found_of(monkeypatch, [(k, v)], of(scale, scale), name)
    assert found.k.saturated == 0.25
    assert found.v.saturated == 0.5


def test_each_head_and_channel_has_its_own_scale(monkeypatch):
    x = torch.full((4, HEADS, 2), 447.0)
    k, v = torch.tensor([[1.0], [0.5]]), torch.tensor([[1.0, 1.0], [1.0, 0.5]])
    found = found_of(monkeypatch, [(x, x)], of(k, v))
    assert (found.k.saturated, found.v.saturated) == (0.5, 0.25)


@pytest.mark.parametrize("name", list(OVER))
def test_underflow_is_what_becomes_zero_and_was_not(monkeypatch, name):
    fmt = FORMATS[name]
    half = 0.5 * fmt.min_subnormal * fmt.scale_from_e4m3 * 0.25
    k = filled(0.99 * half, -0.99 * half, 1.01 * half, 0.0, 0.0)
    v = filled(0.0, 0.0, 0.0, 1.01 * half, 1e3 * half)
    found = found_of(monkeypatch, [(k, v)], of(0.25, 0.25), name)
    assert found.k.underflow == pytest.approx(2 / 3)
    assert found.v.underflow == 0.0


def test_a_center_is_subtracted_first(monkeypatch):
    """Neither saturates what is near the center, nor does the center itself vanish."""
    center = torch.tensor([[1000.0], [-1000.0]])
    k = center + filled(0.0, 100.0, 448.0, 0.25 * 2.0**-10)
    found = found_of(monkeypatch, [(k, k)], of(1.0, 1.0, center))
    assert found.k.saturated == 0.0
    assert found.k.underflow == pytest.approx(1 / 3)
    assert found.v.saturated == 1.0  # a center is of K alone
    assert found.centered
    assert not found_of(monkeypatch, [(k, k)], of(1.0, 1.0)).centered
    away = found_of(monkeypatch, [(-k, k)], of(1.0, 1.0, center))
    assert away.k.saturated == 1.0


def test_texts_add_up(monkeypatch):
    """By their numbers: three of 10 tokens saturate, whichever text they are in."""
    one, two = filled(500.0, 1.0), filled(*[500.0] * 2, *[1.0] * 6)
    found = found_of(monkeypatch, [(one, two[:2]), (two, one.repeat(4, 1, 1))], of(1.0, 1.0))
    assert found.k.saturated == pytest.approx(0.3)
    assert found.v.saturated == pytest.approx(0.6)


def test_no_text_and_nothing_but_zeros(monkeypatch):
    nothing = found_of(monkeypatch, [], of(1.0, 1.0))
    zeros = found_of(monkeypatch, [(filled(0.0), filled(0.0))], of(1.0, 1.0))
    for side in (nothing.k, nothing.v, zeros.k, zeros.v):
        assert (side.saturated, side.underflow) == (0.0, 0.0)
        assert set(side.error.values()) == {0.0}
    assert (nothing.k.amax, nothing.v.amax) == (AMAX["k"], AMAX["v"])


def test_nan_is_an_error_that_names_the_layer(monkeypatch):
    with pytest.raises(ConfigError, match="layer 0: expected finite K and V"):
        found_of(monkeypatch, [(filled(1.0), filled(torch.nan))], of(1.0, 1.0))


# -- errors ----------------------------------------------------------------------------------------


def naive_error(x: torch.Tensor, kept: torch.Tensor, unit: torch.Tensor, fmt) -> float:
    """Of `kept`, stored by the specification, in relation to `x`."""
    lost = decode(encode(kept / unit, fmt), fmt) * unit - kept
    return (lost.double().square().sum() / x.double().square().sum()).sqrt().item()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3fnuz"])
def test_errors_of_every_format(monkeypatch, centered, name):
    """Heads and channels have scales of their own, and K and V other head sizes."""
    k, v = torch.randn(40, HEADS, 6) + 1.0, torch.randn(40, HEADS, 4)
    k[3, 1, 2] = 7.0  # saturates
    k_scale = torch.tensor([[0.008], [0.011]])
    v_scale = torch.linspace(0.006, 0.02, HEADS * 4).view(HEADS, 4)
    center = torch.randn(HEADS, 6) if centered else None
    found = found_of(monkeypatch, [(k, v)], of(k_scale, v_scale, center), name)
    names = dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_e3m4", "fp8_e2m5", "int8", name))
    both = [*names, *(f"dynamic {n}" for n in names)]
    assert found.centered == centered
    assert list(found.k.error) == list(found.v.error) == both
    kept = k - center if centered else k
    for n in names:
        fmt = FORMATS[n]
        dynamic_k = search_scale(k, fmt).float()[..., None]
        dynamic_v = dynamic_scale(v, fmt).float()[..., None]
        unit = fmt.scale_from_e4m3
        assert found.k.error[n] == pytest.approx(naive_error(k, kept, k_scale * unit, fmt))
        assert found.v.error[n] == pytest.approx(naive_error(v, v, v_scale * unit, fmt))
        assert found.k.error[f"dynamic {n}"] == pytest.approx(
            naive_error(k, k, dynamic_k, fmt), rel=1e-3
        )
        assert found.v.error[f"dynamic {n}"] == pytest.approx(
            naive_error(v, v, dynamic_v, fmt), rel=1e-3
        )


def test_errors_of_some_tokens_of_every_text(monkeypatch):
    """Of 2,000 tokens every second one is measured, whichever text it is in."""
    texts = [(torch.randn(n, HEADS, 4), torch.randn(n, HEADS, 4)) for n in (1301, 699)]
    found = found_of(monkeypatch, texts, of(0.01, 0.01))
    some = torch.cat([k for k, _ in texts])[::2]
    fmt = FORMATS["fp8_e4m3"]
    expected = naive_error(some, some, torch.tensor(0.01), fmt)
    assert found.k.error["fp8_e4m3"] == pytest.approx(expected)


def test_amax_of_both_signs_and_every_head():
    k = torch.tensor([[[1.0, -5.0], [2.0, 0.5]], [[4.0, 0.0], [3.0, -2.5]]])
    parts = measure_range(k, -2 * k, None, None)
    assert head_amax(parts) == {"k": (5.0, 3.0), "v": (10.0, 6.0)}
    both = merge_ranges(parts, measure_range(-3 * k[1:], k[1:], None, None))
    assert head_amax(both) == {"k": (12.0, 9.0), "v": (10.0, 6.0)}


# -- the digest of scales --------------------------------------------------------------------------


def test_the_digest_is_of_every_number_and_shape():
    one, two, center = torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, 4)
    other = center.clone()
    other[1, 3] = 1e-6
    layers = [
        of(one, two),
        of(2 * one, two),
        of(one, 2 * two),
        of(one, two, center),
        of(one, two, other),
        of(torch.tensor(1.0), two),
        of(one, torch.tensor(1.0)),
        of(torch.ones(1, 2), two),
        of(one, torch.ones(2, 4)),
        of(one, torch.ones(1, 2)),
    ]
    digests = [KVScales({0: layer}).digest for layer in layers]
    assert len(set(digests)) == len(layers)
    assert KVScales({1: layers[0]}).digest not in digests
    assert KVScales({0: layers[0], 1: layers[0]}).digest not in digests
    assert KVScales({0: of(one.clone(), two.clone())}).digest == digests[0]


# -- what was done before --------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(
        "hf_fp8kv.calibration.state.time", SimpleNamespace(monotonic=lambda: now.seconds)
    )
    return now


@pytest.mark.parametrize("stop", [0, 2, 3, 7])
def test_a_fold_goes_on_after_what_was_saved(tmp_path, clock, stop):
    """An item takes a second, and the file is written every three: what came after is lost."""
    path, items = tmp_path / "state", [10 * n for n in range(8)]
    did: list[int] = []

    def step(parts, item):
        did.append(item)
        clock.seconds += 1.0
        if stop is not None and item == 10 * stop:
            raise KeyboardInterrupt
        before = parts.get("items", torch.zeros(0, dtype=torch.int64))
        return {"items": torch.cat([before, torch.tensor([item])])}

    first = State(path, "one")
    first.fold("before", (None,), lambda parts, item: {"x": torch.ones(1)})
    with pytest.raises(KeyboardInterrupt):
        first.fold("text", items, step)
    saved = stop // 3 * 3
    assert did == items[: stop + 1]

    did.clear()
    stop = None
    second = State(path, "one")
    assert second.fold("before", (None,), lambda *_: pytest.fail("done again")) == {"x": 1.0}
    told: list[tuple[int, bool]] = []
    found = second.fold("text", items, step, lambda item, again: told.append((item, again)))
    assert did == items[saved:]
    assert found["items"].tolist() == items
    assert told == [(item, item < 10 * saved) for item in items]

    did.clear()
    assert State(path, "one").fold("text", items, step)["items"].tolist() == items
    assert did == []


def test_time_of_all_runs_adds_up(tmp_path, clock):
    def step(parts, item):
        clock.seconds += 7.0
        return {"x": torch.ones(1)}

    first = State(tmp_path / "state", "one")
    first.fold("text", (1, 2), step)
    assert first.seconds == 14.0
    clock.seconds += 1000.0  # between the runs
    second = State(tmp_path / "state", "one")
    clock.seconds += 2.0
    assert second.seconds == 16.0


def test_a_fold_that_is_dropped_is_not_saved(tmp_path):
    path = tmp_path / "state"
    state = State(path, "one")
    for name in ("large", "small"):
        state.fold(name, (None,), lambda parts, item: {"x": torch.ones(1)})
        state.drop("large")
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == ["small/x"]


# A file in place of the state: all of its bytes, or changes of the metadata of a good one.
BAD_STATES = {
    "empty": (b"", "expected the state of a calibration"),
    "json": (b"{}", "expected the state of a calibration"),
    "an-older-version": ({"hf_fp8kv_state": "0"}, "got another file"),
    "no-version": ({"hf_fp8kv_state": None}, "got another file"),
    "nothing-done": ({"done": None}, "got another file"),
    "another-calibration": ({"of": "two"}, "another model, other texts"),
    "of-no-calibration": ({"of": None}, "another model, other texts"),
    "cut-off": ({"done": "{"}, "delete it to start anew"),
    "done-empty": ({"done": "{}"}, "got a damaged one"),
    "done-a-list": ({"done": "[]"}, "got a damaged one"),
    "done-no-number": ({"done": '{"folds": {"text": "many"}, "seconds": 1}'}, "got a damaged one"),
    "done-other-folds": ({"done": '{"folds": {}, "seconds": 1}'}, "got a damaged one"),
}


def test_what_a_killed_run_left_is_removed(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda part, path: part)  # it ends before the last step
        patched.setattr(Path, "unlink", lambda part, **_: None)
        State(tmp_path / "state", "one").fold(
            "text", (1,), lambda parts, item: {"x": torch.ones(1)}
        )
    (left,) = tmp_path.iterdir()
    State(tmp_path / "state", "one")
    assert left.exists(), "its process runs"
    left.rename(str(left).replace(f".{os.getpid()}-", f".{2**22 + 1}-"))
    State(tmp_path / "state", "one")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("change", "message"), BAD_STATES.values(), ids=BAD_STATES)
def test_a_file_that_is_not_the_state_is_refused_and_kept(tmp_path, change, message):
    path = tmp_path / "state"
    State(path, "one").fold("text", (1,), lambda parts, item: {"x": torch.ones(1)})
    assert State(path, "one").folds["text"]["x"] == 1.0  # unchanged, it is read
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        with safe_open(path, "pt") as file:
            about = {**file.metadata(), **change}
        about = {name: value for name, value in about.items() if value is not None}
        save_file({"text/x": torch.ones(1)}, path, about)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=message):
        State(path, "one")
    assert path.read_bytes() == before


# -- the length of texts ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_text_is_longer_than_the_model_has_positions(name):
    model = tiny(name)[0]  # of 256 positions
    lengths = [limit_length(model, length) for length in (1, 255, 256, 257, 100_000)]
    assert lengths == [1, 255, 256, 256, 256]


def test_a_long_text_is_cut_to_the_positions_of_the_model():
    model = tiny("llama", num_hidden_layers=1, max_position_embeddings=32)[0]
    asked: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: asked.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    text = torch.arange(200) % (VOCAB - 3) + 3
    calibrate(model, [text], max_length=1024, held_out=0, progress=False)
    assert max(asked) == 32
