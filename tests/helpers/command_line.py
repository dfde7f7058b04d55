"""A function that runs the command line in this process, and a tiny model for its commands."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_fp8kv_cli as cli

WORDS = ["<s>", "</s>", "<unk>", "London", "is", "the", "capital", "of", *map(chr, range(97, 123))]

# A function of command-line arguments and `stdin`. It returns the exit code, stdout and stderr.
Runner = Callable[..., tuple[int, str, str]]


def save_tiny_model(
    folder: Path, dtype: torch.dtype = torch.bfloat16, *, positions: int = 256
) -> str:
    """Save a tiny Llama with a word tokenizer, without an end token. Return the folder."""
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    return save_tiny_weights(folder, len(WORDS), positions, dtype)


def save_tiny_weights(
    folder: Path, vocab_size: int, positions: int, dtype: torch.dtype = torch.float32
) -> str:
    """Save a random tiny Llama without a tokenizer and without an end token. Return the folder."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=positions, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return str(folder)


def make_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Return a `Runner` that expects the command to end with SystemExit."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hf-fp8kv", *arguments])
        content = io.BytesIO(stdin.encode("utf-8", "surrogateescape"))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content, "utf-8"))
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        out, err = capsys.readouterr()
        return exit_info.value.code or 0, out, err

    return run
