"""Tiny random models of nearly every generative model type of transformers, for tests.

`list_types()` lists the types. `build_model(name)` makes `(model, inputs)` for a type in about a
tenth of a second. `build_variant` also accepts names of features, such as "gqa", and both accept
fields of the config, such as `head_dim=64`. Names contain model types of transformers: `llama`
(decoder-only), `seq2seq/bart` (encoder-decoder), `vision/llava` (text model and image encoder).

Every model is in fp32 on the CPU, in eval mode, without an end token, and is reproducible from its
seed. The weights are rescaled. With transformers' standard deviation of 0.02, the answers of a tiny
model would depend only on its embedding, and a test would not notice a broken cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    EncoderDecoderConfig,
    PreTrainedConfig,
    PreTrainedModel,
    VisionEncoderDecoderConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

NEW_TOKENS = 8
PROMPT_TOKENS = 13
PAD_TOKENS = 3
SOURCE_TOKENS = 11
TARGET_TOKENS = 4
VOCAB = 99
WINDOW = 8

Inputs = dict[str, torch.Tensor]
Fields = dict[str, Any]
ModelInputs = tuple[PreTrainedModel, Inputs]

# Config fields of all types. Each type gets the fields that its config has.
COMMON_FIELDS: Fields = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "unpadded_vocab_size": VOCAB,
    "max_position_embeddings": 256, "n_positions": 256,
    "max_source_positions": 64, "max_target_positions": 64, "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "embedding_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "ffn_hidden_size": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "num_key_value_heads": 2, "encoder_num_key_value_heads": 2, "decoder_num_key_value_heads": 2,
    "head_dim": 16, "d_kv": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": WINDOW, "local_attention": WINDOW, "attention_chunk_size": WINDOW,
    "attn_logit_softcapping": 2.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
# Models with latents have equal numbers of key and query heads, and different head sizes.
LATENT_FIELDS: Fields = {
    "num_key_value_heads": 4,
    "index_head_dim": 16,
    # With 16 heads, few scores are 0. The choice among equal scores depends on their number.
    "index_n_heads": 16,
    "index_topk": 8,
}
# Fields of image and audio encoders, whose output has the width of the text model.
ENCODER_FIELDS: Fields = {
    "hidden_size": 64, "intermediate_size": 64, "embed_dim": 64,
    "num_hidden_layers": 1, "num_blocks": 1, "depth": 1, "encoder_layers": 1,
    "num_attention_heads": 4, "num_heads": 4,
    "image_size": 28, "crop_size": 28, "patch_size": 14,
    "out_hidden_size": 64, "vision_output_dim": 64, "projection_dim": 64,
    "projector_input_dim": 64, "projector_output_dim": 64,
    "adapter_in_dim": 64, "adapter_input_size": 64, "adapter_out_dim": 64,
    "downsample_hidden_size": 8, "ext_pw_out_channel": 64,
    "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64, "num_mel_bins": 16,
}  # fmt: skip

_NO_HEAD_DIM: Fields = {"head_dim": None}
_MAMBA2: Fields = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_INDEXER: Fields = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
_BLT_MODULE: Fields = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
_DECODER_FIELDS: Fields = {
    "is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False,
}  # fmt: skip
# Encoder-decoders whose decoder is also a separate causal model.
DECODER_TYPES = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
    "pegasus", "plbart", "prophetnet", "whisper",
)  # fmt: skip
# Fields that a causal type needs in addition to `COMMON_FIELDS`. None removes a common field.
CAUSAL_EXTRAS: dict[str, Fields] = {
    "bamba": {"attn_layer_indices": [1], **_MAMBA2},
    "blt": {
        "encoder_hash_byte_group_vocab": 32,
        **{
            f"{name}_config": {**_BLT_MODULE}
            for name in ("patcher", "encoder", "decoder", "global")
        },
    },
    "codegen": {"rotary_dim": 8, **_NO_HEAD_DIM},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "dots1": {"n_shared_experts": 1, "routed_scaling_factor": 1.0},
    "dots3_note_text": {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "head_dim": 16,
        "per_layer_config": {i: {"kv_lora_rank": 24, "head_dim": 16} for i in (1, 3)},
    },
    "falcon": dict(_NO_HEAD_DIM),
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "glm5_next": {
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 16,
        "index_kpool": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 8, **_NO_HEAD_DIM},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_groups": 1, **_MAMBA2},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 0,
        "expert_layer_period": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "num_hidden_layers": None,
        "num_layers": 2,
        "head_dim": 8,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    # Layers may have no RoPE, or attend to another layer's keys, with or without an indexer.
    "mistral_large4": {
        "num_hidden_layers": 5,
        "no_rope_layers": [1, 0, 1, 0, 1],
        "kv_source_layers": [0, 1, 0, 1, 4],
        "indexer_types": ["full", "full", "full", "shared", "full"],
        "layer_types": ["indexed_attention"] * 5,
    },
    "qwen4_exp_text": {
        "ple_embed_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
        **_INDEXER,
    },
    "qwen2_vl": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "recurrent_gemma": {
        "lru_width": 64,
        "attention_window_size": WINDOW,
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "layer_types": None,
        "head_dim": None,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "layer_types": None,
        "head_dim": None,
        "num_key_value_heads": 4,
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
CAUSAL_EXTRAS["qwen4_exp"] = CAUSAL_EXTRAS["qwen4_exp_text"]
# Text models that transformers lists with the models for images and text.
TEXT_TYPES_LISTED_AS_VISION = ("glm5_next", "mistral4", "mistral_large4")
SEQ2SEQ_EXTRAS: dict[str, Fields] = {
    **{name: {} for name in DECODER_TYPES},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blenderbot": {"encoder_no_repeat_ngram_size": 0},
    "fsmt": {"langs": ["en", "de"], "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB},
    "led": {"attention_window": 4},
    "longt5": {"local_radius": 4},
    "m2m_100": {},
    "marian": {"decoder_vocab_size": VOCAB},
    "mt5": {},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64},
    "pegasus_x": {"num_global_tokens": 2, "block_size": 4},
    "prophetnet": {"num_hidden_layers": None},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5": {},
    "umt5": {},
    "whisper": {"begin_suppress_tokens": None, "num_mel_bins": 16},
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 16},
    "moonshine": {"encoder_num_key_value_heads": 4},
}
# Encoder-decoders whose config consists of two complete configs.
NESTED_TYPES = ("encoder-decoder", "t5gemma", "t5gemma2", "vision-encoder-decoder")
VISION_TYPES = ("gemma3", "internvl", "llava", "paligemma", "qwen2_vl")
TEXT_TOKEN, VISION_START_TOKEN, VISION_END_TOKEN, VIDEO_TOKEN, IMAGE_TOKEN = 7, 95, 96, 97, 98
# Fields that composite types need outside the config of their text part.
OUTER_EXTRAS: dict[str, Fields] = {
    "gemma3": {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4},
    "internvl": {"image_token_id": IMAGE_TOKEN, "downsample_ratio": 1.0},
    "llava": {"image_token_index": IMAGE_TOKEN},
    "paligemma": {"image_token_index": IMAGE_TOKEN, "projection_dim": 64},
    "qwen2_vl": {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "vision_start_token_id": VISION_START_TOKEN,
        "vision_end_token_id": VISION_END_TOKEN,
    },
}
NUM_AUDIO_FRAMES = {"whisper": 128, "speech_to_text": 48}


def list_types(kind: str | None = None) -> list[str]:
    """Return the types of one kind ("causal", "seq2seq", "vision"), or of all kinds."""
    available = set(TEXT_TYPES_LISTED_AS_VISION) & MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    names_by_kind = {
        "causal": sorted(available.union(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
        "seq2seq": sorted(f"seq2seq/{name}" for name in (*SEQ2SEQ_EXTRAS, *NESTED_TYPES)),
        "vision": [f"vision/{name}" for name in VISION_TYPES],
    }
    kinds = [kind] if kind else list(names_by_kind)
    return [name for each_kind in kinds for name in names_by_kind[each_kind]]


# Types and arguments of `build_variant`, by the name of a feature to test.
VARIANTS: dict[str, tuple[str, Fields]] = {
    "gqa": ("llama", {}),
    "mha": ("llama", {"num_key_value_heads": 4}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "head_dim_64": ("llama", {"head_dim": 64}),
    "biased_keys": ("qwen2", {"key_bias": 4.0}),
    "sliding": ("mistral", {}),
    "sliding_and_full": ("gemma3_text", {}),
    "softcap": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
    "kv_sharing": ("gemma3n_text", {}),
    "kv_sharing_unscaled": ("gemma4_text", {}),
    "chunked": ("llama4_text", {}),
    "latent": ("deepseek_v3", {}),
    "sparse": ("glm_moe_dsa", {}),
    "hybrid": ("qwen3_next", {}),
    "alibi": ("bloom", {}),
    "position_bias": ("seq2seq/t5", {}),
    "cross_attention": ("seq2seq/bart", {}),
    "speech": ("seq2seq/whisper", {}),
    "vision": ("vision/llava", {}),
}


def build_variant(name: str, seed: int = 0, **fields: Any) -> ModelInputs:
    """Build a type or one of `VARIANTS`. `key_bias` is the standard deviation of the bias of K."""
    model_type, variant_fields = VARIANTS.get(name, (name, {}))
    all_fields = variant_fields | fields
    key_bias = all_fields.pop("key_bias", 0.0)
    model, inputs = build_model(model_type, seed, **all_fields)
    generator = torch.Generator().manual_seed(seed + 3)
    for parameter_name, parameter in model.named_parameters():
        if key_bias and parameter_name.endswith("k_proj.bias"):
            parameter.data = key_bias * torch.randn(parameter.shape, generator=generator)
    return model, inputs


def build_model(
    name: str, seed: int = 0, *, attn_implementation: str | None = None, **fields: Any
) -> ModelInputs:
    """Return a model, and arguments of `generate` with a batch of two that contains padding.

    Args:
        name: One of `list_types()`.
        seed: Seed of the weights and the prompt.
        attn_implementation: Attention implementation. None means the model's default.
        **fields: Fields of the config, or of the decoder's or text model's config if it has one.
    """
    kind, _, type_name = name.rpartition("/")
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    torch.manual_seed(seed)
    if kind == "seq2seq":
        model, inputs = _build_seq2seq(type_name, seed, fields, attention)
        model.generation_config.decoder_start_token_id = 1
    elif kind == "vision":
        model, inputs = _build_vision(type_name, seed, fields, attention)
    else:
        is_listed_as_vision = type_name in TEXT_TYPES_LISTED_AS_VISION
        auto_class = AutoModelForImageTextToText if is_listed_as_vision else AutoModelForCausalLM
        model = auto_class.from_config(make_causal_config(type_name, **fields), **attention)
        inputs = make_prompt(seed)
    model = model.eval()
    rescale(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model, inputs


def make_prompt(seed: int = 0, *, tokens: int = PROMPT_TOKENS, pad: int = PAD_TOKENS) -> Inputs:
    """Return two rows of random tokens. The first row has `pad` tokens of padding on the left."""
    ids = torch.randint(4, 90, (2, tokens), generator=torch.Generator().manual_seed(seed + 1))
    mask = torch.ones_like(ids)
    ids[0, :pad] = 0
    mask[0, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


def rescale(model: PreTrainedModel, seed: int = 0, gain: float = 1.0) -> None:
    """Rescale each matrix to a gain of about `gain`, and randomize the biases and sinks."""
    generator = torch.Generator().manual_seed(seed + 2)
    has_unscaled_logits = str(getattr(model.config, "model_type", "")).startswith("gemma4")
    output_weight = getattr(model.get_output_embeddings(), "weight", None)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and any(part in name for part in _EMBEDDING_PARTS):
                # With larger weights, an embedding that is also the output layer would always
                # predict the last token again.
                weight.mul_((0.1 if weight is output_weight else 1.0) / weight.float().std())
            if any(part in name for part in _UNCHANGED_PARTS) or not weight.is_floating_point():
                continue
            if weight.ndim == 2:
                _set_std(weight, gain * weight.shape[1] ** -0.5)
            elif weight.ndim == 3 and "expert" in name:
                _set_std(weight, gain * max(weight.shape[1:]) ** -0.5)
            elif name.endswith("sinks"):
                weight.copy_(torch.randn(weight.shape, generator=generator))
            elif weight.ndim == 1 and name.endswith("bias") and len(weight) != VOCAB:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            elif has_unscaled_logits and name.endswith("q_norm.weight"):
                # gemma4 does not scale its logits, so they would amplify any rounding.
                weight.mul_(0.25)


_EMBEDDING_PARTS = ("embed_tokens", "word_embeddings", "wte", "shared.weight", "embed_in")
_UNCHANGED_PARTS = (
    *("embed", "wte", "wpe", "position", "shared.weight", "conv", "router", "gate."),
    *("A_log", "dt_", "correction", "balancing", "relative_attention_bias"),
)


def _set_std(weight: torch.Tensor, target_std: float) -> None:
    """Rescale a matrix, unless it is constant or its deviation is 1 to 3 times the target."""
    std = float(weight.float().std())
    if 1e-8 < std < target_std or std > 3 * target_std:
        weight.mul_(target_std / std)


def make_causal_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """Return a tiny config of a causal type. `overrides` has fields of its text part."""
    base = AutoConfig.for_model(name)
    text = base.get_text_config(decoder=True)
    text_key = next((key for key in base.sub_configs if getattr(base, key, None) is text), None)
    text = base if text_key is None else text
    common_fields = dict(COMMON_FIELDS)
    default_fields = _get_fields(text)
    if _has_field(text, "kv_lora_rank", default_fields):
        common_fields.update(LATENT_FIELDS)
        del common_fields["head_dim"]
    fields = _select_fields(text, common_fields, {}) | _make_layer_fields(name, text)
    if name in DECODER_TYPES:
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            fields.pop(key, None)
        fields.update(_DECODER_FIELDS)
    elif _has_field(text, "is_decoder", default_fields):
        fields["is_decoder"] = True
    fields = _select_fields(text, fields, CAUSAL_EXTRAS.get(name, {}) | overrides)
    outer_fields: Fields = {}
    if text_key is not None:
        fields = {text_key: {"model_type": text.model_type, **fields}}
        outer_fields = {"tie_word_embeddings": False, **OUTER_EXTRAS.get(name, {})}
    return _make_config(type(base), {**_make_encoder_fields(base, text), **outer_fields, **fields})


# Fields for which None is a value. Otherwise None removes a field.
_NULLABLE_FIELDS = ("eos_token_id", "forced_eos_token_id", "q_lora_rank")


def _make_layer_fields(name: str, text: PreTrainedConfig) -> Fields:
    """Return fields for at least two layers, with every kind of layer that the type has."""
    all_types = getattr(text, "layer_types", None)
    is_settable = all_types is not None and _has_field(text, "layer_types", _get_fields(text))
    if not is_settable or "mamba" in name:
        return {}
    types = list(dict.fromkeys(all_types))
    layer_types = (2 * types)[: max(2, len(types))]
    return {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}


def _make_encoder_fields(base: PreTrainedConfig, text: PreTrainedConfig) -> Fields:
    """Return small configs for the image and audio encoders of a composite config."""
    sub_configs = {key: getattr(base, key, None) for key in base.sub_configs}
    return {
        key: _select_fields(config, ENCODER_FIELDS, {"model_type": config.model_type})
        for key, config in sub_configs.items()
        if config is not None and config is not text and hasattr(config, "model_type")
    }


def _make_config(cls: type[PreTrainedConfig], fields: Fields) -> PreTrainedConfig:
    """Return a config, without `layer_types` if the type derives them from other fields."""
    try:
        return cls(**fields)
    except AttributeError as error:
        if "no setter" not in str(error):
            raise
        return cls(**{key: value for key, value in fields.items() if key != "layer_types"})


_CONFIG_ERRORS = (ValueError, KeyError, NotImplementedError)


def _get_fields(config: PreTrainedConfig) -> Fields | None:
    """Return the fields of a config, or None if it cannot be converted to a dict."""
    try:
        return config.to_dict()
    except _CONFIG_ERRORS:
        return None


def _has_field(config: PreTrainedConfig, key: str, fields: Fields | None) -> bool:
    """Return whether a config with `fields` has the field `key`, and the field can be set."""
    member = getattr(type(config), key, None)
    if isinstance(member, property) and member.fset is None:
        return False
    try:
        return fields is None or key in fields or hasattr(config, key)
    except _CONFIG_ERRORS:
        return True


def _select_fields(config: PreTrainedConfig, candidates: Fields, overrides: Fields) -> Fields:
    """Return the candidates that the config has, and `overrides`, without fields set to None."""
    default_fields = _get_fields(config)
    fields = {
        key: value for key, value in candidates.items() if _has_field(config, key, default_fields)
    }
    fields |= overrides
    return {
        key: value for key, value in fields.items() if value is not None or key in _NULLABLE_FIELDS
    }


def _build_seq2seq(name: str, seed: int, fields: Fields, attention: Fields) -> ModelInputs:
    # Encoders are padded on the right.
    prompt = make_prompt(seed, tokens=SOURCE_TOKENS)
    source = {argument: tensor.flip(1) for argument, tensor in prompt.items()}
    target = make_prompt(seed + 5, tokens=TARGET_TOKENS, pad=0)["input_ids"]
    target[:, 0] = 1
    generator = torch.Generator().manual_seed(seed + 1)
    if name in NESTED_TYPES:
        config = _make_nested_config(name, fields)
    else:
        base = AutoConfig.for_model(name)
        fields = _select_fields(base, COMMON_FIELDS, {**SEQ2SEQ_EXTRAS[name], **fields})
        config = _make_config(type(base), fields)
    auto_class: Any = AutoModelForSeq2SeqLM
    if name == "vision-encoder-decoder":
        auto_class = AutoModelForImageTextToText
        source = {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}
    elif name in NUM_AUDIO_FRAMES:
        auto_class = AutoModelForSpeechSeq2Seq
        num_frames = NUM_AUDIO_FRAMES[name]
        shape = (2, 16, num_frames) if name == "whisper" else (2, num_frames, 16)
        source = {"input_features": torch.randn(shape, generator=generator)}
    elif name == "moonshine":
        auto_class = AutoModelForSpeechSeq2Seq
        source = {"input_values": torch.randn(2, 4000, generator=generator)}
    return auto_class.from_config(config, **attention), {**source, "decoder_input_ids": target}


def _make_nested_config(name: str, overrides: Fields) -> PreTrainedConfig:
    special_ids = {"eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 1}
    if name.startswith("t5gemma"):
        base = AutoConfig.for_model(name)
        fields = _select_fields(base.decoder, COMMON_FIELDS, {})
        fields |= _make_layer_fields(name, base.decoder) | overrides
        encoder = dict(fields)
        if name == "t5gemma2":
            encoders = _make_encoder_fields(base.encoder, base.encoder.text_config)
            encoder = {"text_config": fields, **encoders}
        return type(base)(encoder=encoder, decoder=fields, vocab_size=VOCAB, **special_ids)
    decoder = make_causal_config("bert", add_cross_attention=True, **overrides)
    if name == "encoder-decoder":
        encoder = make_causal_config("bert", is_decoder=False)
        return EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **special_ids)
    vit = AutoConfig.for_model("vit")
    encoder = type(vit)(**_select_fields(vit, ENCODER_FIELDS, {}))
    return VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **special_ids)


def _build_vision(name: str, seed: int, fields: Fields, attention: Fields) -> ModelInputs:
    """Build a text model with an image encoder. Each prompt has an image of four patches."""
    config = make_causal_config(name, **fields)
    model = AutoModelForImageTextToText.from_config(config, **attention)
    inputs = make_prompt(seed)
    inputs["input_ids"][:, 5:9] = IMAGE_TOKEN
    generator = torch.Generator().manual_seed(seed + 4)
    if name == "qwen2_vl":
        # Four patches of 14 x 14 are merged into one token.
        inputs["input_ids"][:, 5] = VISION_START_TOKEN
        inputs["input_ids"][:, 7:9] = TEXT_TOKEN
        inputs["pixel_values"] = torch.randn(8, 3 * 2 * 14 * 14, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 2, 2]] * 2)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).int()
        return model, inputs
    inputs["pixel_values"] = torch.randn(2, 3, 28, 28, generator=generator)
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).int()
    return model, inputs
