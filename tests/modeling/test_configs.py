"""Tests of unusual configs: properties that no model of transformers has, and a missing config."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_fp8kv import ConfigError
from hf_fp8kv.modeling.layer_specs import read_config
from hf_fp8kv.modeling.tensor_parallel import count_kv_heads


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a config\.json that transformers can read"):
        read_config(tmp_path)


def test_each_layer_of_a_heterogeneous_config_has_its_heads() -> None:
    layers = [SimpleNamespace(num_key_value_heads=num_heads) for num_heads in (2, 4)]
    config = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    assert [count_kv_heads(config, index) for index in range(2)] == [2, 4]
