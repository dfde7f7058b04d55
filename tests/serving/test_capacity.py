"""Tests of the number of tokens that the planner of an engine fits into a given memory."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from hf_fp8kv import ConfigError
from hf_fp8kv.serving import capacity
from hf_fp8kv.serving.capacity import GIB, MODELS, get_config, plan_tokens
from hf_fp8kv.serving.config import ServingConfig
from tests.helpers import command_line

pytestmark = pytest.mark.text


def make_config(**keywords: Any) -> ServingConfig:
    return ServingConfig.parse(backend="torch", **keywords)


# Bytes of a value of K and a value of V, and of both scales.
@pytest.mark.parametrize(
    ("options", "value_bytes", "scale_bytes"),
    [
        ({"dtype": "auto"}, 4, 0),
        ({"key_dtype": "auto", "scales": 1.0}, 3, 0),
        ({"scales": 1.0}, 2, 0),
        ({}, 2, 4),
    ],
)
@pytest.mark.parametrize("model_name", MODELS)
def test_capacity_is_the_memory_over_the_bytes_per_token(
    model_name: str, options: dict[str, Any], value_bytes: int, scale_bytes: int
) -> None:
    # With 20 GiB more memory, the number of tokens grows by 20 GiB over the bytes per token.
    model_config = get_config(model_name).get_text_config()
    dim = getattr(model_config, "head_dim", None)
    dim = dim or model_config.hidden_size // model_config.num_attention_heads
    num_heads = model_config.num_key_value_heads * model_config.num_hidden_layers
    token_bytes = num_heads * (value_bytes * dim + scale_bytes)
    tokens_in_20_gib, tokens_in_40_gib = (
        plan_tokens(model_config, gib * GIB, make_config(**options), attention="flash_attention_2")
        for gib in (20, 40)
    )
    expected = capacity.MEMORY_SHARE * 20 * GIB / token_bytes
    assert tokens_in_20_gib < expected
    assert tokens_in_40_gib - tokens_in_20_gib == pytest.approx(expected, rel=0.005)


def test_too_little_memory_for_a_step_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"expected room .* got 0\.5 GiB"):
        plan_tokens(get_config("Llama-3.1-8B"), GIB // 2, make_config())


def test_the_command_prints_the_tokens_of_a_model(monkeypatch, capsys, tmp_path) -> None:
    # A token has K and V of two heads with 16 values in two layers.
    run = command_line.make_runner(monkeypatch, capsys)
    model_path = command_line.save_tiny_model(tmp_path)
    options = ("capacity", model_path, "--memory", "9GiB")
    code, output, error = run(*options, "--json")
    assert code == 0, error
    rows = {row["cache"]: row for row in json.loads(output)["rows"]}
    assert {row["model"] for row in rows.values()} == {model_path}
    assert rows["bf16, flash"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert rows["fp8, static scales"]["bytes_per_token"] == 2 * 2 * 2 * 16
    paged = rows["fp8, dynamic scales"]
    assert paged["bytes_per_token"] == 2 * 2 * 2 * 18
    assert paged["ratio"] == paged["tokens"] / rows["bf16, flash"]["tokens"]
    assert rows["int6, dynamic scales"]["bytes_per_token"] == 2 * 2 * 2 * 14
    assert rows["bf16, sdpa"]["tokens"] < rows["bf16, flash"]["tokens"]
    code, output, error = run(*options)
    assert code == 0, error
    assert "Tokens that fit into 9 GiB" in output
    assert f"{rows['bf16, flash']['tokens']:,}" in output


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (None, "no such folder"), ("t5", "with an encoder"), ("deepseek_v3", "with latents (MLA)"),
        ("jamba", "full_attention and sliding_attention"),
    ],
)  # fmt: skip
def test_the_command_refuses_unsupported_models(monkeypatch, capsys, tmp_path, model_type, message):
    if model_type is not None:
        AutoConfig.for_model(model_type).save_pretrained(tmp_path / "model")
    run = command_line.make_runner(monkeypatch, capsys)
    code, output, error = run("capacity", str(tmp_path / "model"))
    assert (code, output) == (1, "")
    assert message in error
