"""Tests that a model on two GPUs (`device_map`) gives the tokens of a model on one GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_fp8kv import FP8PagedCache
from tests.reproducible.test_training import make_scales

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NUM_LAYERS = 4
NUM_KV_HEADS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return a random model on one GPU, and the same model with half of it on a second GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=NUM_LAYERS, num_attention_heads=8,
        num_key_value_heads=NUM_KV_HEADS, head_dim=64, vocab_size=1000, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    device_map = {f"model.layers.{index}": index // 2 for index in range(NUM_LAYERS)}
    device_map |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    one_gpu, two_gpus = (
        AutoModelForCausalLM.from_pretrained(
            folder, device_map=placement, attn_implementation="fp8_paged"
        ).eval()
        for placement in (0, device_map)
    )
    return one_gpu, two_gpus


def make_prompts() -> dict[str, torch.Tensor]:
    """Return two rows of 300 tokens. The first row begins with 100 tokens of padding."""
    ids = torch.randint(1, 1000, (2, 300), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    return {"input_ids": ids.to("cuda:0"), "attention_mask": mask.to("cuda:0")}


@pytest.mark.parametrize("max_cache_len", [None, 400], ids=["growing", "preallocated"])
@pytest.mark.parametrize(
    "scales",
    [None, make_scales(NUM_LAYERS, NUM_KV_HEADS, has_center=False)],
    ids=["dynamic scales", "static scales"],
)
def test_two_gpus_give_the_tokens_of_one_gpu(models, max_cache_len, scales):
    outputs = []
    for model in models:
        cache = FP8PagedCache(
            model.config, scales=scales, max_cache_len=max_cache_len, prefill="stored"
        )
        tokens = model.generate(
            **make_prompts(), past_key_values=cache, max_new_tokens=24, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        outputs.append(tokens.tolist())
    assert outputs[0] == outputs[1]
