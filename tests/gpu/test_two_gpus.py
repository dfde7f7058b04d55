"""Tests that a model on two GPUs (`device_map`) gives the tokens of a model on one GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_fp8kv import FP8PagedCache, KVScales, LayerScales

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LAYERS, HEADS = 4, 4
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return a random model on one GPU, and the same model with half of it on a second GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=HEADS, head_dim=64, vocab_size=1000, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    device_map: dict[str, int] = {f"model.layers.{i}": i // 2 for i in range(LAYERS)}
    device_map |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    one_gpu, two_gpus = (
        AutoModelForCausalLM.from_pretrained(
            folder, device_map=placement, attn_implementation="fp8_paged"
        ).eval()
        for placement in (0, device_map)
    )
    return one_gpu, two_gpus


def make_scales() -> KVScales:
    generator = torch.Generator().manual_seed(5)

    def random_scales() -> torch.Tensor:
        return 4 * (0.5 + torch.rand(HEADS, 1, generator=generator)) / 448

    return KVScales(
        {index: LayerScales(random_scales(), random_scales()) for index in range(LAYERS)}
    )


def make_prompt(tokens: int = 300) -> dict[str, torch.Tensor]:
    """Return two rows, one of which starts with pages of padding."""
    ids = torch.randint(1, 1000, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    return {"input_ids": ids.to("cuda:0"), "attention_mask": mask.to("cuda:0")}


@pytest.mark.parametrize("cache_options", [{}, {"max_cache_len": 400}], ids=["growing", "static"])
@pytest.mark.parametrize("scale_kind", [None, "heads"], ids=["dynamic", "static-scales"])
def test_two_gpus_give_the_tokens_of_one_gpu(models, cache_options, scale_kind):
    answers = []
    for model in models:
        cache_scales = None if scale_kind is None else make_scales()
        cache = FP8PagedCache(model.config, scales=cache_scales, prefill="stored", **cache_options)
        answers.append(model.generate(**make_prompt(), past_key_values=cache, **GREEDY).tolist())
    assert answers[0] == answers[1]


def test_forks_and_loaded_caches_continue_on_two_gpus(models, tmp_path):
    """A fork, and a cache that was loaded to the CPU, continue like the original."""
    _, model = models
    cache = FP8PagedCache(model.config, scales=make_scales(), prefill="stored")
    inputs = make_prompt()
    with torch.no_grad():
        model(**{name: t[:, :290] for name, t in inputs.items()}, past_key_values=cache)
    copies = [cache.fork(), FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))]
    answers = [
        model.generate(**inputs, past_key_values=c, **GREEDY).tolist() for c in (cache, *copies)
    ]
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
