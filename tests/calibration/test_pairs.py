"""Tests of finding the channels that RoPE rotates together, in models and in random values."""

import pytest
import torch

from hf_fp8kv.calibration.observe import find_paged_layers
from hf_fp8kv.calibration.rope import match_channels, measure_partners
from tests.helpers.tiny_models import VOCAB, build_variant

pytestmark = pytest.mark.text
WINDOW = torch.randint(3, VOCAB, (64,), generator=torch.Generator().manual_seed(1))


def pair_halves(dim: int, num_rotated: int | None = None, start: int = 0) -> list[int]:
    """Return the partners of `dim` channels. `num_rotated` channels from `start` are rotated."""
    num_pairs = (num_rotated or dim) // 2
    partners = list(range(dim))
    for i in range(start, start + num_pairs):
        partners[i], partners[i + num_pairs] = i + num_pairs, i
    return partners


def pair_neighbors(dim: int) -> list[int]:
    return [i ^ 1 for i in range(dim)]


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("llama", {}, [pair_halves(16)] * 2),
        ("cohere2", {}, [pair_neighbors(16), list(range(16))]),
        ("gpt_neox", {}, [pair_halves(16, 4)] * 2),
        ("gpt2", {}, [list(range(16))] * 2),
        ("gemma3_text", {}, [pair_halves(16)] * 2),
    ],
    ids=["halves", "neighbors-and-none", "a-quarter", "learned-positions", "two-thetas"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_partners_match_the_code_of_the_model(name, config, expected, dtype):
    model = build_variant(name, **config)[0].to(dtype)
    partners = measure_partners(model, WINDOW, find_paged_layers(model))
    assert [partners[i].k.tolist() for i in sorted(partners)] == expected
    assert all(layer.v.tolist() == list(range(len(layer.v))) for layer in partners.values())


def test_a_latent_model_has_its_rotated_channels_in_v():
    model = build_variant("deepseek_v3")[0]
    partners = measure_partners(model, WINDOW, find_paged_layers(model))
    for layer in partners.values():
        assert layer.k.tolist() == list(range(len(layer.k)))
        assert layer.v.tolist() != list(range(len(layer.v)))


def test_partners_of_a_model_without_rope_are_unknown():
    model = build_variant("bloom")[0]
    partners = measure_partners(model, torch.arange(3, 60), find_paged_layers(model))
    assert {(layer.k, layer.v) for layer in partners.values()} == {(None, None)}


def rotate_pairs(x: torch.Tensor, position: int, theta: float, partners: list[int]) -> torch.Tensor:
    """Apply RoPE to pairs of channels. Each pair rotates more slowly than the previous pair."""
    rotated = x.clone()
    pairs = [(i, j) for i, j in enumerate(partners) if i < j]
    for index, (i, j) in enumerate(pairs):
        angle = torch.tensor(position * theta ** (-index / len(pairs)), dtype=torch.float64)
        rotated[..., i] = x[..., i] * angle.cos() - x[..., j] * angle.sin()
        rotated[..., j] = x[..., i] * angle.sin() + x[..., j] * angle.cos()
    return rotated


PARTNERS = {
    "halves": pair_halves(64), "neighbors": pair_neighbors(64), "first-half": pair_halves(64, 32),
    "second-half": pair_halves(64, 32, 32), "none": list(range(64)),
}  # fmt: skip


@pytest.mark.parametrize("partners", PARTNERS.values(), ids=PARTNERS)
# Two combinations cover both values of each parameter, because noise and theta are independent.
@pytest.mark.parametrize(("noise", "theta"), [(0.0, 1e6), (0.01, 1e4)], ids=["exact", "rounded"])
def test_partners_are_found_despite_slow_rotation_and_rounding(partners, noise, theta):
    """Some pairs rotate too slowly to be detected. The noise is as large as 16-bit rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 2, 64, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-1, 1, 64)[torch.randperm(64, generator=generator)]
    x[..., 5] += 30.0  # a channel with a bias
    rotated = rotate_pairs(x, 2000, theta, partners)
    rotated *= 1 + noise * torch.randn(rotated.shape, generator=generator, dtype=torch.float64)
    assert match_channels(x, rotated).tolist() == partners


# Patterns that no model has, and channels that change independently.
@pytest.mark.parametrize(
    "partners",
    [[3, 2, 1, 0, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [1, 0, 2, 3, 4, 6, 5, 7], None],
    ids=["mirrored-first-half", "mirrored", "with-a-gap", "independent"],
)
def test_unusual_patterns_are_found(partners):
    x, independent_x = torch.randn(2, 512, 1, 8, dtype=torch.float64)
    far_x = rotate_pairs(x, 1, 1.0, partners) if partners else independent_x
    assert match_channels(x, far_x).tolist() == (partners or list(range(8)))
