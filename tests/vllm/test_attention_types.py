"""Tests of chunked attention, encoders, and layers that share pages in vLLM.

The tests run with dtypes of this package, and with vLLM's own "auto", whose results the plugin must
not change.
"""

import pytest
import torch

from .conftest import MODEL_SIZES, generate, generate_expected, make_cache_options

_MODEL_OPTIONS = {
    # Every second layer has full attention. The remaining layers attend within chunks of 64 tokens.
    "llama4_text": MODEL_SIZES | {
        "num_hidden_layers": 4, "intermediate_size_mlp": 128, "num_local_experts": 2,
        "attention_chunk_size": 64, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 5,
        "attn_temperature_tuning": False, "use_qk_norm": False,
    },
    # The last two layers read the pages of earlier layers.
    "gemma3n_text": MODEL_SIZES | {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "laurel_rank": 8,
        "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": None,
    },
    # The config of BERT has no field for the number of KV heads, and no `head_dim`.
    "bert": {
        "hidden_size": 128, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 1024, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    },
}  # fmt: skip
# Factors of the random weights. With larger weights, logits differ more.
_WEIGHT_FACTORS = {"llama4_text": 3, "gemma3n_text": 2, "bert": 3}


@torch.no_grad()
def save_random_model(name, folder):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **_MODEL_OPTIONS[name])
    torch.manual_seed(1)
    auto_class = AutoModel if name == "bert" else AutoModelForCausalLM
    model = auto_class.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(_WEIGHT_FACTORS[name])
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", ["auto", "hf_fp8kv_int8"])
@torch.no_grad()
def test_chunked_attention_gives_the_first_tokens_of_transformers(
    prompts, start_engine, tmp_path, dtype
):
    model = save_random_model("llama4_text", tmp_path)
    tokens, _ = generate(start_engine(str(tmp_path), dtype), prompts, 1)
    last_logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    assert tokens == [[int(logits.argmax())] for logits in last_logits]


@pytest.mark.parametrize("dtype", ["hf_fp8kv_e3m4", "hf_fp8kv_static"])
def test_layers_that_share_pages_give_the_tokens_of_transformers(
    prompts, start_engine, tmp_path, dtype
):
    # A layer that shares pages has no scales. It uses the scales of the layer that wrote them.
    model = save_random_model("gemma3n_text", tmp_path / "model")
    model.set_attn_implementation("fp8_paged")
    options, scales = make_cache_options(dtype, tmp_path, num_layers=4)
    tokens, _ = generate(start_engine(str(tmp_path / "model"), dtype, scales), prompts)
    assert tokens == generate_expected(model, prompts, **options)


@pytest.mark.parametrize("dtype", ["auto", "hf_fp8kv_e3m4"])
@torch.no_grad()
def test_an_encoder_gives_the_same_embeddings(prompts, start_engine, tmp_path, dtype):
    # The attention of an encoder is not causal, and has no cache.
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.config import PoolerConfig

    model = save_random_model("bert", tmp_path)
    # An engine for embeddings needs a tokenizer, although the prompts are token ids.
    word_level = models.WordLevel({str(token): token for token in range(256)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(word_level)).save_pretrained(tmp_path)
    llm = start_engine(
        str(tmp_path), dtype, runner="pooling", skip_tokenizer_init=False,
        max_num_batched_tokens=1024,
        pooler_config=PoolerConfig(task="embed", seq_pooling_type="CLS"),
    )  # fmt: skip
    outputs = llm.encode(
        [{"prompt_token_ids": prompt} for prompt in prompts], pooling_task="embed", use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model(torch.tensor([prompt])).last_hidden_state[0, 0]
        actual = output.outputs.data.float().flatten()
        assert torch.cosine_similarity(actual, expected, dim=0) > 0.999
