"""Tests that all model types give the same tokens with `dtype="auto"` as with DynamicCache.

The fast tier runs one type of each kind. `make test-all` runs all types that can be built.
"""

import pytest
from transformers import DynamicCache

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.tiny_models import build_model, list_types
from tests.tools.sweep import check_type, compare, generate

# transformers warns that the tiny configurations lack token ids.
pytestmark = [pytest.mark.text, pytest.mark.filterwarnings("ignore")]

# Model types by the path of "fp8_paged" attention in a decoding step, as `sweep` names it:
#   fused           reads pages
#   fused, latent   reads pages of latents (MLA), which are keys and values
#   dense           reads dense K and V. With "fused, dense", some layers do.
#   own             is never called: the model calls its own attention
#   not switched    `set_attn_implementation` has no effect. `from_pretrained` with "fp8_paged" was
#                   tried instead, and the model then calls its own attention.
#   refused         cannot be set: the model does not use transformers' attention registry
TYPES_BY_PATH = {
    "fused": (
        "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gpt2", "gpt_neox", "opt",
        "cohere2", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text", "qwen3_next",
        "lfm2", "jamba", "doge", "bert", "bart", "bigbird_pegasus", "seq2seq/bart", "seq2seq/t5",
        "seq2seq/nllb-moe", "seq2seq/moonshine", "vision/llava", "vision/gemma3", "vision/qwen2_vl",
    ),
    "fused, dense": ("gemma4_text", "seq2seq/whisper", "seq2seq/t5gemma"),
    "dense": ("diffllama", "deepseek_v4", "inkling2_text", "zamba2"),
    "fused, latent": ("deepseek_v3", "glm_moe_dsa"),
    "own": ("git",),
    "not switched; from_pretrained: own": ("bloom", "rembert"),
    "refused": ("falcon", "gptj"),
}  # fmt: skip
PATHS = {name: path for path, names in TYPES_BY_PATH.items() for name in names}
if CACHE == "cache":  # transformers 5.24 or later looks up the attention function of GPT-J
    PATHS["gptj"] = "fused"
    del PATHS["inkling2_text"]  # the tiny model of this type does not run in this version
REFUSED_PATHS = ("refused", "not switched")
# One type of each kind.
FAST_TYPES = (
    "llama",  # grouped-query attention
    "gpt2",  # multi-head attention
    "mistral",  # window
    "gemma2",  # softcap
    "gpt_oss",  # sinks
    "gemma4_text",  # shared K and V
    "llama4_text",  # chunks
    "deepseek_v3",  # latents (MLA)
    "glm_moe_dsa",  # latents with an indexer
    "qwen3_next",  # linear layers
    "seq2seq/bart",  # encoder-decoder with cross attention
    "seq2seq/t5",  # encoder-decoder with position biases
    "vision/llava",  # images
    "falcon",  # refused
    "bloom",  # not switched
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST_TYPES else pytest.param(name, marks=pytest.mark.full)
        for name in list_types()
    ],
)
def test_model_type_gives_the_tokens_of_dynamic_cache(name):
    row = check_type(name)
    if name not in PATHS and not row.has_baseline:
        pytest.skip(row.baseline_error)
    assert row.has_baseline, row.baseline_error
    assert not row.find_failures()
    assert row.own.status == "equal"
    if not row.path.startswith(REFUSED_PATHS):
        assert row.paged.status == "equal"
    assert row.path == PATHS.get(name, row.path)


@pytest.mark.parametrize("name", ["afmoe", "moshi", "phimoe"])
def test_stored_prompts_use_the_window_of_the_config(name):
    """With `prefill="stored"`, attention to a prompt uses the window of the model's config.

    These models pass no window to attention, although the prompts are longer than the window.
    """
    model, inputs = build_model(name, attn_implementation="fp8_paged")
    expected = generate(model, inputs, DynamicCache(config=model.config))
    cache = FP8PagedCache(model.config, dtype="auto", prefill="stored", page_size=16)
    assert compare(expected, generate(model, inputs, cache)).status == "equal"
