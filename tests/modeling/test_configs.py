"""Tests of unusual configs: properties that no model of transformers has, and a missing config."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from transformers import PreTrainedConfig

from hf_fp8kv import ConfigError
from hf_fp8kv.modeling.layer_specs import read_config
from hf_fp8kv.modeling.model_support import EXPAND_METHOD, caches_latents
from hf_fp8kv.modeling.tensor_parallel import count_kv_heads


def test_a_folder_without_a_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a config\.json that transformers can read"):
        read_config(tmp_path)


def test_each_layer_of_a_heterogeneous_config_has_its_heads() -> None:
    layers = [SimpleNamespace(num_key_value_heads=n) for n in (2, 4)]
    config = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    assert [count_kv_heads(config, index) for index in range(2)] == [2, 4]


def test_attention_without_source_code_counts_as_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention class is found in its module, although transformers does not list the model."""
    namespace: dict[str, type] = {}
    exec(f"class Attention:\n    {EXPAND_METHOD} = forward = lambda self: None\n", namespace)
    module = ModuleType("code_of_a_user.modeling_new")
    module.Attention = namespace["Attention"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config_class = type(
        "NewConfig", (PreTrainedConfig,), {"__module__": "code_of_a_user.configuration_new"}
    )
    config = config_class()
    assert not caches_latents(config)
    config.kv_lora_rank = 16
    assert caches_latents(config)
