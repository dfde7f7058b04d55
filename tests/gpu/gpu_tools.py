"""Helpers for tests on a GPU. Without a GPU, tiny models run in Triton's interpreter."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fp8kv import ops

if ops.explain_backends()["triton"] is not None:
    pytest.skip(str(ops.explain_backends()["triton"]), allow_module_level=True)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MARKS = [
    pytest.mark.gpu if ON_GPU else pytest.mark.full,
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NUM_PROMPT_TOKENS = 300 if ON_GPU else 20  # in a row of the prompt of `make_medium_model`
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="requires a GPU, but torch found none")


def make_llama(dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model of medium size, or a tiny model without a GPU.

    With small weights, each query attends to many tokens. Otherwise, a different code for one key
    would change the logits by several percent.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    weight_std = 0.03
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    if not ON_GPU:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        weight_std = 0.1
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig(
        **sizes, **heads, vocab_size=1000, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        initializer_range=weight_std, attn_implementation="fp8_paged",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE, dtype)


def make_medium_model(num_padding: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model of `make_llama`, and a prompt whose first of two rows has padding."""
    model = make_llama()
    ids = torch.randint(1, 1000, (2, NUM_PROMPT_TOKENS), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :num_padding] = 0
    return model, {"input_ids": ids, "attention_mask": mask}


@contextlib.contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Make torch raise an error if Python waits for the GPU. Without a GPU, this does nothing."""
    if not ON_GPU:
        yield
        return
    torch.cuda.synchronize()
    previous_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous_mode)
