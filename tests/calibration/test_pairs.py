"""Tests of finding the channels that RoPE rotates together, in models and in random values."""

import pytest
import torch

from hf_fp8kv.calibration.observe import paged_layers
from hf_fp8kv.calibration.rope import match_channels, measure_partners
from tests.helpers.tiny_models import VOCAB, tiny

pytestmark = pytest.mark.text


def halves(size: int, block: int | None = None, start: int = 0) -> list[int]:
    block = block or size
    partner = list(range(size))
    for i in range(start, start + block // 2):
        partner[i], partner[i + block // 2] = i + block // 2, i
    return partner


def neighbors(size: int) -> list[int]:
    return [i ^ 1 for i in range(size)]


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("llama", {}, [halves(16)] * 2),
        ("cohere2", {}, [neighbors(16), list(range(16))]),
        ("gpt_neox", {}, [halves(16, 4)] * 2),
        ("gpt2", {}, [list(range(16))] * 2),
        ("gemma3_text", {}, [halves(16)] * 2),
    ],
    ids=["halves", "neighbors-and-none", "a-quarter", "learned-positions", "two-thetas"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_partners_match_the_code_of_the_model(name, config, expected, dtype):
    model = tiny(name, **config)[0].to(dtype)
    window = torch.randint(3, VOCAB, (64,), generator=torch.Generator().manual_seed(1))
    partners = measure_partners(model, window, paged_layers(model))
    assert [partners[i].k.tolist() for i in sorted(partners)] == expected
    assert all(f.v.tolist() == list(range(len(f.v))) for f in partners.values())


def test_a_latent_model_has_its_rotated_part_in_v():
    model = tiny("deepseek_v3")[0]
    window = torch.randint(3, VOCAB, (64,), generator=torch.Generator().manual_seed(1))
    layers = measure_partners(model, window, paged_layers(model))
    for partners in layers.values():
        assert partners.k.tolist() == list(range(len(partners.k)))
        assert partners.v.tolist() != list(range(len(partners.v)))


def test_partners_of_a_model_without_rope_are_unknown():
    model = tiny("bloom")[0]
    partners = measure_partners(model, torch.arange(3, 60), paged_layers(model))
    assert {(f.k, f.v) for f in partners.values()} == {(None, None)}


def rotate(x: torch.Tensor, position: int, base: float, partner: list[int]) -> torch.Tensor:
    """Apply RoPE to pairs. Each pair rotates more slowly than the previous pair."""
    out = x.clone()
    pairs = [(i, j) for i, j in enumerate(partner) if i < j]
    for index, (i, j) in enumerate(pairs):
        angle = torch.tensor(position * base ** (-index / len(pairs)), dtype=torch.float64)
        out[..., i] = x[..., i] * angle.cos() - x[..., j] * angle.sin()
        out[..., j] = x[..., i] * angle.sin() + x[..., j] * angle.cos()
    return out


@pytest.mark.parametrize(
    "partner",
    [halves(64), neighbors(64), halves(64, 32), halves(64, 32, 32), list(range(64))],
    ids=["halves", "neighbors", "first-half", "second-half", "none"],
)
# Grid: each pattern with two combinations, because noise and base are independent.
@pytest.mark.parametrize(("noise", "base"), [(0.0, 1e6), (0.01, 1e4)], ids=["exact", "rounded"])
def test_partners_are_found_despite_slow_rotation_and_rounding(partner, noise, base):
    """Some pairs rotate too slowly to be detected, and some values were rounded to 16 bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 2, 64, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-1, 1, 64)[torch.randperm(64, generator=generator)]
    x[..., 5] += 30.0  # a channel with a bias
    far = rotate(x, 2000, base, partner)
    far = far * (1 + noise * torch.randn(far.shape, generator=generator, dtype=torch.float64))
    assert match_channels(x, far).tolist() == partner


# Grid: each pattern that no model has, and channels that change independently.
@pytest.mark.parametrize(
    "partner",
    [[3, 2, 1, 0, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [1, 0, 2, 3, 4, 6, 5, 7], None],
    ids=["inside", "mirrored", "gap", "none"],
)
def test_unusual_patterns_are_found(partner):
    x, unrelated = torch.randn(2, 512, 1, 8, dtype=torch.float64)
    far = rotate(x, 1, 1.0, partner) if partner else unrelated
    assert match_channels(x, far).tolist() == (partner or list(range(8)))
