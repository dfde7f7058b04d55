"""The layout `fp8_ds_mla`: its bytes, described independently here, and the way back."""

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig

from hf_fp8kv import ConfigError, FP8PagedCache, from_ds_mla, to_ds_mla
from tests.helpers.assertions import assert_same
from tests.helpers.standin import triton_standin
from tests.helpers.tiny_models import build, type_names

CONFIG = DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=256, qk_rope_head_dim=24)
RANK, POSITIONS, WIDTH = 256, 24, 256 + 8 + 48


def filled(tokens: int = 67, **keywords) -> tuple[FP8PagedCache, dict[int, list[torch.Tensor]]]:
    """Return a cache with two sequences, and its latents and positions."""
    generator = torch.Generator().manual_seed(0)
    cache, given = FP8PagedCache(CONFIG, **keywords), {}
    for layer in range(2):
        latent = torch.randn(2, 1, tokens, RANK, generator=generator).bfloat16()
        latent[..., :128] *= 5
        positions = 9 * torch.randn(2, 1, tokens, POSITIONS, generator=generator).bfloat16()
        cache.update(latent, positions, layer)
        given[layer] = [latent, positions]
    return cache, given


def read(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the bytes, by torch's own float8."""
    codes = rows[..., :RANK].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., RANK : RANK + 8].contiguous().view(torch.float32)
    positions = rows[..., RANK + 8 :].contiguous().view(torch.bfloat16)
    return codes * scales.repeat_interleave(128, -1), positions


@pytest.mark.parametrize("keywords", [{}, {"dtype": "fp8"}, {"dtype": "auto"}], ids=str)
def test_the_bytes(keywords):
    cache, given = filled(**keywords)
    exported = to_ds_mla(cache)
    for layer, rows in exported.items():
        assert rows.dtype == torch.uint8
        assert rows.shape == (2, 67, WIDTH)
        latent, positions = read(rows)
        assert_same(positions, given[layer][1][:, 0])
        dense = cache.layers[layer].keys.dense()[:, 0].float()
        if keywords.get("dtype") == "fp8":
            # codes and scales are copied
            assert (latent - dense).abs().max() <= 2**-8 * dense.abs().max()
            assert_same(latent.bfloat16().float(), dense)
        else:
            blocks = dense.unflatten(-1, (-1, 128))
            step = blocks.abs().amax(-1, keepdim=True) / 448
            error = (latent.unflatten(-1, (-1, 128)) - blocks).abs()
            assert (error <= (blocks.abs() * 2**-4 + step * 2**-10) * 1.001).all()
            assert error.max() > 0


@pytest.mark.parametrize("keywords", [{}, {"max_cache_len": 70}, {"backend": "torch"}], ids=str)
def test_codes_come_back_bit_for_bit(keywords):
    cache, _ = filled(dtype="fp8")
    exported = to_ds_mla(cache)
    again = from_ds_mla(exported, CONFIG, **keywords, dtype="fp8")
    for layer, rows in to_ds_mla(again).items():
        assert_same(rows, exported[layer])
    assert again.get_seq_length() == 67
    # Both caches continue alike.
    new = torch.ones(2, 1, 1, RANK, dtype=torch.bfloat16), torch.ones(2, 1, 1, POSITIONS).bfloat16()
    assert_same(*(x.update(*new, 0)[0].dense()[:, :, :68] for x in (cache, again)))


def test_pages_in_blocks(monkeypatch):
    expected = to_ds_mla(filled(dtype="fp8")[0])
    triton_standin(monkeypatch)
    in_blocks = {"dtype": "fp8", "backend": "triton"}
    cache, _ = filled(**in_blocks)
    for found in (to_ds_mla(cache), to_ds_mla(from_ds_mla(expected, CONFIG, **in_blocks))):
        for layer, rows in expected.items():
            assert_same(found[layer], rows)


def test_other_scales_and_formats_are_rounded_once_more():
    exported = to_ds_mla(filled()[0])
    for keywords, bound in (
        ({"dtype": "auto"}, 2**-8), ({}, 2**-5), ({"dtype": "fp8"}, 2**-4),
    ):  # fmt: skip
        cache = from_ds_mla(exported, CONFIG, **keywords)
        for layer, rows in exported.items():
            latent, positions = read(rows)
            assert_same(cache.layers[layer].values.dense()[:, 0], positions)
            dense = cache.layers[layer].keys.dense()[:, 0].float()
            error = (dense - latent).square().mean() / latent.square().mean()
            assert error.sqrt() < bound


def test_what_cannot_be_written():
    with pytest.raises(ConfigError, match="expected a cache with tokens"):
        to_ds_mla(FP8PagedCache(CONFIG))
    cache = FP8PagedCache(LlamaConfig(num_hidden_layers=1))
    key = torch.randn(1, 2, 5, 64)
    cache.update(key, key, 0)
    with pytest.raises(ConfigError, match="expected latents"):
        to_ds_mla(cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {0: x[0]}, r"those of the layers \[0, 1\], got \[0\]"),
        (lambda x: {0: x[0], 1: x[1][:, :-1]}, "the same in all layers"),
        (lambda x: {i: rows[..., :-1] for i, rows in x.items()}, f"uint8 .B, T, {WIDTH}"),
        (lambda x: {i: rows.short() for i, rows in x.items()}, "uint8"),
    ],
)
def test_what_cannot_be_read(change, message):
    exported = to_ds_mla(filled()[0])
    with pytest.raises(ConfigError, match=message):
        from_ds_mla(change(exported), CONFIG)
    with pytest.raises(ConfigError, match="kv_lora_rank=None"):
        from_ds_mla(exported, LlamaConfig(num_hidden_layers=2))


@pytest.mark.parametrize(
    ("family", "keywords"),
    [
        ("deepseek_v32", {}),
        ("deepseek_v32", {"max_cache_len": 40}),
        ("kimi_linear", {}),
        ("dots3_note_text", {}),
        ("deepseek_v3", {"skip_layers": [0]}),
    ],
)
def test_models_with_more_than_latents(family, keywords):
    """The layout lacks states of these models, so the answers would differ."""
    if family not in type_names():
        pytest.skip(f"this version of transformers has no {family}")
    config = build(family, kv_lora_rank=128)[0].config
    with pytest.raises(ConfigError, match="latents of all tokens and nothing else"):
        from_ds_mla({}, config, **keywords)
