"""Tiny random models that read images or audio, and the arguments that their processors make.

`build_model(name)` makes a model of one of `NAMES` in fp32, without files. A prompt consists of
rows, and a row of parts: a list of text tokens, or a `Medium`, an image or a sound with given
values. `make_inputs(name, rows)` pads the rows on the left and returns the arguments of `generate`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

Fields = dict[str, Any]

VOCAB = 200
TEXT_TOKENS = range(4, 180)
START_TOKEN, END_TOKEN, VIDEO_TOKEN, PLACEHOLDER = 190, 191, 192, 193
PAD_TOKEN = 0
SPECIAL_TOKENS = (PAD_TOKEN, 1, 2, 3, *range(TEXT_TOKENS.stop, VOCAB))
HIDDEN = 32


@dataclasses.dataclass(frozen=True)
class Medium:
    """An image or a sound of random values. `offset` is added to the value in the middle."""

    seed: int
    offset: float = 0.0


Part = list[int] | Medium
Token = tuple[int, Medium | None]  # an id, and the medium of a placeholder


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model type: how the tests build and call it.

    Attributes:
        make_config: Function that returns the config.
        shape: Shape of the values of one medium.
        num_tokens: Number of placeholder tokens of one medium.
        collate: Function that makes the arguments of `generate` from values `[media, *shape]`, and
            the number of media of each row.
        brackets: Tokens before and after the placeholders.
        token_types: Name of the argument with the types of the tokens, or "".
        marks_placeholders: Whether the type of placeholders is 1. All other types are 0.
        is_causal: Whether the states of a token do not depend on later tokens.
        can_crop: Whether the cache can remove tokens. A recurrent state cannot.
        small_change: Difference of one value that changes the embeddings of a medium.
    """

    make_config: Callable[[], PreTrainedConfig]
    shape: tuple[int, ...]
    num_tokens: int
    collate: Callable[[Tensor, list[int]], dict[str, Any]]
    brackets: tuple[tuple[int, ...], tuple[int, ...]] = ((START_TOKEN,), (END_TOKEN,))
    token_types: str = ""
    marks_placeholders: bool = True
    is_causal: bool = True
    can_crop: bool = True
    small_change: float = 0.125


def build_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a model in eval mode, without an end token, whose answers depend on all inputs."""
    torch.manual_seed(seed)
    config = KINDS[name].make_config()
    try:
        model = AutoModelForImageTextToText.from_config(config)
    except ValueError:  # audio
        model = AutoModelForMultimodalLM.from_config(config)
    model = model.eval().float()
    _redraw_weights(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_text(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(TEXT_TOKENS.start, TEXT_TOKENS.stop, (num_tokens,), generator=generator)
    return tokens.tolist()


def make_values(name: str, medium: Medium) -> Tensor:
    values = torch.randn(KINDS[name].shape, generator=torch.Generator().manual_seed(medium.seed))
    values.view(-1)[values.numel() // 2] += medium.offset
    return values


def make_inputs(name: str, rows: list[list[Part]]) -> dict[str, Any]:
    """Return the arguments of `generate` that the type's processor gives for a prompt."""
    kind = KINDS[name]
    tokens_by_row = list_tokens(name, rows)
    ids = torch.tensor([[token for token, _ in row] for row in tokens_by_row])
    mask = (ids != PAD_TOKEN).long()
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if kind.token_types:
        is_marked = (ids == PLACEHOLDER) & kind.marks_placeholders
        inputs[kind.token_types] = is_marked.long()
    media = [[part for part in row if isinstance(part, Medium)] for row in rows]
    if any(media):
        values = torch.stack([make_values(name, medium) for row in media for medium in row])
        inputs |= kind.collate(values, [len(row) for row in media])
    return inputs


def list_tokens(name: str, rows: list[list[Part]]) -> list[list[Token]]:
    """Return the tokens of each row, padded on the left to the same length."""
    kind = KINDS[name]
    before, after = kind.brackets
    tokens_by_row = []
    for row in rows:
        tokens: list[Token] = []
        for part in row:
            if isinstance(part, Medium):
                tokens += [(token, None) for token in before]
                tokens += [(PLACEHOLDER, part)] * kind.num_tokens
                tokens += [(token, None) for token in after]
            else:
                tokens += [(token, None) for token in part]
        tokens_by_row.append(tokens)
    width = max(map(len, tokens_by_row))
    padding: list[Token] = [(PAD_TOKEN, None)]
    return [padding * (width - len(tokens)) + tokens for tokens in tokens_by_row]


def _redraw_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw weights again. Matrices get unit gain, or more in attention, to depend on images."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1 and ("embed_tokens" in name or "word_embeddings" in name):
                weight.copy_(noise)
            elif weight.ndim > 1:
                gains = [gain for part, gain in _GAINS.items() if part in name]
                std = max(gains, default=1.0) * weight[0].numel() ** -0.5
                weight.copy_(std * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)


_GAINS = {
    "lm_head": 2.0, "q_proj": 1.5, "k_proj": 1.5, "o_proj": 4.0, "out_proj": 4.0,
    "self_attn.dense": 4.0,
}  # fmt: skip


_TEXT: Fields = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "tie_word_embeddings": False, "sliding_window": 256,
}  # fmt: skip
_VISION: Fields = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip
_MROPE: Fields = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_PLACEHOLDERS: Fields = {
    "image_token_index": PLACEHOLDER, "image_token_id": PLACEHOLDER,
    "audio_token_index": PLACEHOLDER, "audio_token_id": PLACEHOLDER,
}  # fmt: skip


def _configure(
    name: str, text: Fields | None = None, vision: Fields | None = None, *,
    text_type: str = "", vision_type: str = "", **fields: Any,
) -> Callable[[], PreTrainedConfig]:  # fmt: skip
    def make_config() -> PreTrainedConfig:
        base = AutoConfig.for_model(name)
        sub_configs: Fields = {}
        parts = (
            ("text_config", text_type, _TEXT, text or {}),
            ("vision_config", vision_type, _VISION, vision or {}),
        )
        for key, type_name, defaults, overrides in parts:
            if key in base.sub_configs:
                model_type = type_name or getattr(base, key).model_type
                sub_configs[key] = {"model_type": model_type, **defaults, **overrides}
        placeholder_fields = _PLACEHOLDERS.keys() & base.to_dict().keys()
        placeholders = dict.fromkeys(placeholder_fields, PLACEHOLDER)
        return type(base)(**{"tie_word_embeddings": False, **placeholders, **sub_configs, **fields})

    return make_config


def _stack(values: Tensor, counts: list[int]) -> dict[str, Any]:
    return {"pixel_values": values}


def _add_sizes(values: Tensor, counts: list[int]) -> dict[str, Any]:
    return {"pixel_values": values, "image_sizes": torch.tensor([[16, 16]] * len(values))}


def _flatten_patches(grid: tuple[int, int, int]) -> Callable[[Tensor, list[int]], dict[str, Any]]:
    def collate(values: Tensor, counts: list[int]) -> dict[str, Any]:
        grids = torch.tensor([grid] * len(values))
        return {"pixel_values": values.flatten(0, 1), "image_grid_thw": grids}

    return collate


def _group_by_row(values: Tensor, counts: list[int]) -> dict[str, Any]:
    """Return images as `[rows, images, ...]`. Shorter rows end with images of zeros."""
    grouped = values.new_zeros(len(counts), max(counts), *values.shape[1:])
    images = iter(values)
    for row, count in enumerate(counts):
        for column in range(count):
            grouped[row, column] = next(images)
    return {"pixel_values": grouped}


def _add_patch_masks(values: Tensor, counts: list[int]) -> dict[str, Any]:
    mask = torch.ones(values.shape[:2], dtype=torch.long)
    shapes = torch.tensor([[4, 4]] * len(values))
    return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _add_audio_mask(values: Tensor, counts: list[int]) -> dict[str, Any]:
    mask = torch.ones(len(values), values.shape[-1], dtype=torch.long)
    return {"input_features": values, "feature_attention_mask": mask}


_QWEN_TOKENS: Fields = {
    "video_token_id": VIDEO_TOKEN, "vision_start_token_id": START_TOKEN,
    "vision_end_token_id": END_TOKEN,
}  # fmt: skip
_PIXELS = (3, 16, 16)
# A grid of 2 x 4 patches of 8 x 8, of which 2 x 2 are merged into a token.
_QWEN_GRID = (1, 2, 4)
_QWEN_SHAPE = (8, 3 * 2 * 8 * 8)

# Chameleon's images consist of tokens, whose names contain a number with letters for digits.
_IMAGE_TOKEN_NAMES = [
    str(number).translate(str.maketrans("0123456789", "ABCDEFGHIJ")) for number in range(32)
]
_CHAMELEON_TOKENS = {f"IMGIMG{name}Z": 10 + i for i, name in enumerate(_IMAGE_TOKEN_NAMES)}

KINDS: dict[str, Kind] = {
    "llava": Kind(_configure("llava"), _PIXELS, 4, _stack),
    "vipllava": Kind(
        _configure("vipllava", vision_feature_layers=[-1, -2], vision_feature_layer=[-1, -2]),
        _PIXELS, 4, _stack,
    ),
    "llava_next": Kind(
        _configure("llava_next", image_grid_pinpoints=[[16, 16]], vision_feature_layer=-1),
        (2, *_PIXELS), 4 + 4 + 2, _add_sizes,
    ),
    "llava_onevision": Kind(
        _configure("llava_onevision", image_grid_pinpoints=[[16, 16]]),
        (2, *_PIXELS), 4 + 4 + 2, _add_sizes,
    ),
    "qwen2_vl": Kind(
        _configure(
            "qwen2_vl", {"rope_parameters": _MROPE},
            {"embed_dim": 32, "depth": 2, "num_heads": 2, "hidden_size": HIDDEN, "mlp_ratio": 2},
            **_QWEN_TOKENS,
        ),
        _QWEN_SHAPE, 2, _flatten_patches(_QWEN_GRID), token_types="mm_token_type_ids",
    ),
    "qwen2_5_vl": Kind(
        _configure(
            "qwen2_5_vl", {"rope_parameters": _MROPE},
            {
                "depth": 2, "num_heads": 2, "out_hidden_size": HIDDEN, "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_QWEN_TOKENS,
        ),
        _QWEN_SHAPE, 2, _flatten_patches(_QWEN_GRID), token_types="mm_token_type_ids",
    ),
    "qwen3_vl": Kind(
        _configure(
            "qwen3_vl", {"rope_parameters": _MROPE},
            {
                "depth": 2, "num_heads": 2, "out_hidden_size": HIDDEN,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            **_QWEN_TOKENS,
        ),
        _QWEN_SHAPE, 2, _flatten_patches(_QWEN_GRID), token_types="mm_token_type_ids",
    ),
    "glm4v": Kind(
        _configure(
            "glm4v", {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
            {"depth": 2, "num_heads": 2, "out_hidden_size": HIDDEN},
            image_start_token_id=START_TOKEN, image_end_token_id=END_TOKEN,
            video_token_id=VIDEO_TOKEN, video_start_token_id=188, video_end_token_id=189,
        ),
        _QWEN_SHAPE, 2, _flatten_patches(_QWEN_GRID), token_types="mm_token_type_ids",
    ),
    "gemma3": Kind(
        _configure(
            "gemma3", {"layer_types": ["sliding_attention", "full_attention"]},
            mm_tokens_per_image=4, boi_token_index=START_TOKEN, eoi_token_index=END_TOKEN,
        ),
        _PIXELS, 4, _stack, token_types="token_type_ids",
    ),
    "paligemma": Kind(
        _configure(
            "paligemma", {"sliding_window": None}, {"projection_dim": HIDDEN}, projection_dim=HIDDEN
        ),
        _PIXELS, 4, _stack, brackets=((), ()), token_types="token_type_ids",
        marks_placeholders=False, is_causal=False,
    ),
    "internvl": Kind(
        _configure(
            "internvl", text_type="qwen2", vision={"image_size": [16, 16], "patch_size": [4, 4]},
            downsample_ratio=0.5,
        ),
        _PIXELS, 4, _stack,
    ),
    "idefics3": Kind(
        _configure("idefics3", vision={"patch_size": 4}, scale_factor=2), _PIXELS, 4, _group_by_row
    ),
    "smolvlm": Kind(
        _configure("smolvlm", vision={"patch_size": 4}, scale_factor=2), _PIXELS, 4, _group_by_row
    ),
    "aya_vision": Kind(
        _configure(
            "aya_vision", {"layer_types": ["sliding_attention", "full_attention"]},
            {"patch_size": 4}, downsample_factor=2,
        ),
        _PIXELS, 4, _stack,
    ),
    "mistral3": Kind(
        _configure("mistral3", vision={"patch_size": 4, "head_dim": 16}, spatial_merge_size=2),
        _PIXELS, 4, _add_sizes,
    ),
    "got_ocr2": Kind(
        _configure(
            "got_ocr2",
            vision={
                "image_size": 32, "patch_size": 4, "output_channels": 16, "window_size": 2,
                "global_attn_indexes": [1], "mlp_dim": 32,
            },
        ),
        (3, 32, 32), 4, _stack,
    ),
    "fuyu": Kind(
        _configure("fuyu", {"num_key_value_heads": 2}, patch_size=8, image_size=16),
        (4, 3 * 8 * 8), 4, _stack,
    ),
    "qwen2_audio": Kind(
        _configure(
            "qwen2_audio",
            audio_config={
                "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "d_model": 32,
                "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
                "max_source_positions": 8,
            },
        ),
        (8, 16), 4, _add_audio_mask,
    ),
    "voxtral": Kind(
        _configure(
            "voxtral", {"hidden_size": HIDDEN},
            audio_config={
                "model_type": "voxtral_encoder", "num_mel_bins": 8, "hidden_size": 32,
                "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
                "max_source_positions": 8,
            },
            hidden_size=HIDDEN,
        ),
        (8, 16), 2, lambda values, counts: {"input_features": values},
    ),
    "chameleon": Kind(
        _configure(
            "chameleon", **{name: value for name, value in _TEXT.items() if name != "head_dim"},
            vocabulary_map={"<image>": PLACEHOLDER, **_CHAMELEON_TOKENS},
            vq_config={
                "embed_dim": 8, "num_embeddings": 32, "latent_channels": 8, "resolution": 16,
                "base_channels": 32, "channel_multiplier": (1, 1, 2), "num_res_blocks": 1,
            },
        ),
        _PIXELS, 16, _stack, small_change=64.0,
    ),
    "cohere2_vision": Kind(
        _configure(
            "cohere2_vision", {"layer_types": ["sliding_attention", "full_attention"]},
            {"patch_size": 4}, downsample_factor=2, alignment_intermediate_size=32,
        ),
        _PIXELS, 4, _stack,
    ),
    "ovis2": Kind(
        _configure(
            "ovis2", text_type="qwen2",
            vision={
                "patch_size": 4, "hidden_stride": 2, "vocab_size": 32,
                "num_visual_indicator_tokens": 5,
            },
            visual_indicator_token_ids=[185, 186, 187, 188, 189], vocab_size=VOCAB,
            hidden_size=HIDDEN,
        ),
        _PIXELS, 4, _stack,
    ),
    "idefics2": Kind(
        _configure(
            "idefics2", vision={"patch_size": 4},
            perceiver_config={
                "model_type": "idefics2_perceiver", "hidden_size": HIDDEN,
                "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                "resampler_head_dim": 16, "num_key_value_heads": 1,
            },
        ),
        _PIXELS, 4, _group_by_row,
    ),
    "lfm2_vl": Kind(
        _configure(
            "lfm2_vl", {"layer_types": ["conv", "full_attention"]},
            {"patch_size": 4, "num_patches": 16}, downsample_factor=2, projector_hidden_size=32,
        ),
        (16, 48), 4, _add_patch_masks, can_crop=False,
    ),
    "qwen3_5": Kind(
        _configure(
            "qwen3_5",
            {
                "layer_types": ["linear_attention", "full_attention"],
                "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
                "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            {
                "depth": 2, "num_heads": 2, "out_hidden_size": HIDDEN,
                "num_position_embeddings": 16,
            },
            **_QWEN_TOKENS,
        ),
        _QWEN_SHAPE, 2, _flatten_patches(_QWEN_GRID), token_types="mm_token_type_ids",
        can_crop=False,
    ),
    "kosmos-2": Kind(
        _configure(
            "kosmos-2",
            {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 2, "dropout": 0.0},
            latent_query_num=4,
        ),
        _PIXELS, 4, _stack, token_types="image_embeds_position_mask", is_causal=False,
    ),
    "glm_ocr": Kind(
        _configure(
            "glm_ocr", {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
            {"depth": 2, "num_heads": 2, "out_hidden_size": HIDDEN},
            image_start_token_id=START_TOKEN, image_end_token_id=END_TOKEN,
            video_token_id=VIDEO_TOKEN, video_start_token_id=188, video_end_token_id=189,
        ),
        _QWEN_SHAPE, 2, _flatten_patches(_QWEN_GRID), token_types="mm_token_type_ids",
    ),
}  # fmt: skip
NAMES = tuple(KINDS)


@functools.cache
def get_shared_model(name: str) -> PreTrainedModel:
    """Return a model that tests share and must not change."""
    return build_model(name)
