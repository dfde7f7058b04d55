"""Write the golden files to a folder: `python tests/data/caches/make.py FOLDER`.

Each case has two files: `NAME.safetensors`, a cache after a prompt, and
`NAME.continued.safetensors`, the same cache after `continue_cache`. All files are in version 6 of
the format. Write them again only for a new version of the format.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from hf_fp8kv import FP8PagedCache, KVScales, LayerScales, StoragePlan
from hf_fp8kv.cache.tokens import Tokens
from hf_fp8kv.formats import LayerPlan

NUM_HEADS = 2
HEAD_DIM = 16
PROMPT_TOKENS = 13


def make_config(model_type: str) -> Any:
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_DIM, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64,
    }  # fmt: skip
    if model_type == "llama":
        return LlamaConfig(**sizes)
    if model_type == "mistral":
        return MistralConfig(**sizes, sliding_window=8)
    return Gemma3TextConfig(
        **sizes, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )


def make_plan() -> StoragePlan:
    center = torch.linspace(-2, 2, NUM_HEADS * HEAD_DIM).view(NUM_HEADS, HEAD_DIM)
    centered_plan = LayerPlan.parse("int8 rotated centered", "fp8_e2m5")
    return StoragePlan(
        {
            0: LayerScales(None, None, center, plan=centered_plan),
            1: LayerScales(None, None, plan=LayerPlan.parse("int6", "int4 rotated")),
        }
    )


def make_scales(*, has_center: bool) -> KVScales:
    k, v = torch.tensor([[0.01], [0.04]]), torch.tensor([[0.5], [0.002]])
    channels = torch.arange(NUM_HEADS * HEAD_DIM).reshape(NUM_HEADS, HEAD_DIM)
    k_center = channels / 8 if has_center else None
    return KVScales(
        {index: LayerScales(k * (index + 1), v * (index + 1), k_center) for index in range(2)}
    )


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"dtype": "fp8_e4m3"}),
    "dynamic-e3m4-e5m2": (
        "llama",
        {"dtype": "fp8_e4m3", "key_dtype": "fp8_e3m4", "value_dtype": "fp8_e5m2"},
    ),
    "dynamic-int8-e2m5": ("llama", {"dtype": "int8", "value_dtype": "fp8_e2m5"}),
    "planned": ("llama", {"plan": make_plan()}),
    "static-scales": ("llama", {"scales": make_scales(has_center=False)}),
    "centered": ("llama", {"scales": make_scales(has_center=True)}),
    "constant-scale": ("llama", {"scales": 0.5}),
    "auto": ("llama", {"dtype": "auto"}),
    "sliding": ("mistral", {"dtype": "fp8_e4m3"}),
    "two-groups": ("gemma3", {"dtype": "fp8_e4m3"}),
    "stock-layers": ("gemma3", {"dtype": "fp8_e4m3", "skip_layers": ["sliding_attention"]}),
    "preallocated": ("llama", {"dtype": "fp8_e4m3", "max_cache_len": 30}),
    "preallocated-two-groups": ("gemma3", {"plan": make_plan(), "max_cache_len": 30}),
    "without-config": ("", {"dtype": "fp8_e4m3"}),
    "default": ("llama", {}),
    "default-preallocated": ("gemma3", {"max_cache_len": 30}),
    "empty": ("llama", {"dtype": "fp8_e4m3"}),
}


def append_tokens(cache: FP8PagedCache, num_tokens: int, seed: int) -> None:
    """Append random keys and values of `num_tokens` tokens to both layers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, NUM_HEADS, num_tokens, HEAD_DIM)
    for index in range(2):
        keys = torch.randint(-64, 65, shape, generator=generator) / 8
        cache.update(keys, keys.flip(-1) + index, index)


def make_cache(name: str) -> FP8PagedCache:
    model_type, options = CASES[name]
    cache = FP8PagedCache(make_config(model_type) if model_type else None, page_size=8, **options)
    if name != "empty":
        append_tokens(cache, PROMPT_TOKENS, 0)
        cache.reorder_cache(torch.tensor([1, 1]))
    if name == "dynamic":  # as `generate()` of an enabled model sets them
        ids = torch.arange(2 * PROMPT_TOKENS).reshape(2, PROMPT_TOKENS)
        cache.tokens = Tokens(ids, (ids > 0).long(), ids[:1], ids[:, :4] - 1)
        cache.model_sample = "sample"
    return cache


def continue_cache(cache: FP8PagedCache) -> None:
    """Append 4 steps of one token, swap the sequences, and append 6 more tokens."""
    for step in range(4):
        append_tokens(cache, 1, 1 + step)
    cache.reorder_cache(torch.tensor([1, 0]))
    append_tokens(cache, 6, 9)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in CASES:
        cache = make_cache(name)
        cache.save(folder / f"{name}.safetensors")
        continue_cache(cache)
        cache.save(folder / f"{name}.continued.safetensors")
