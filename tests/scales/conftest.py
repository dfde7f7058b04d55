"""Fixture of a small checkpoint, to which tests add scales."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.declared import save_plain


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """Return the folder of a tiny Llama, with one weight file and the usual other files."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory) -> Path:
    """Return the folder of a tiny unquantized Llama, whose layers compute K and V."""
    return save_plain(tmp_path_factory.mktemp("checkpoint") / "plain")
