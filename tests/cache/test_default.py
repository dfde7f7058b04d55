"""Tests of the storage plans that keywords choose. The default is E3M4 with dynamic scales."""

from typing import Any

import pytest
import torch

from hf_fp8kv import ConfigError, FP8PagedCache, KVScales
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.serving.config import ServingConfig
from tests.helpers.tiny_models import make_causal_config

pytestmark = pytest.mark.text

E3M4 = "fp8_e3m4"
E4M3 = "fp8_e4m3"


def make_cache(**keywords: Any) -> FP8PagedCache:
    return FP8PagedCache(make_causal_config("llama"), page_size=8, **keywords)


@pytest.mark.parametrize(
    ("keywords", "formats"),
    [
        ({}, (E3M4, E3M4)),
        ({"value_dtype": "fp8_e5m2"}, (E3M4, "fp8_e5m2")),
        ({"plan": E3M4}, (E3M4, E3M4)),
        ({"key_dtype": "auto"}, ("auto", E3M4)),
        ({"dtype": "fp8"}, (E4M3, E4M3)),
        ({"dtype": torch.float8_e4m3fn}, (E4M3, E4M3)),
        ({"plan": ["fp8", "fp8_e5m2"]}, (E4M3, "fp8_e5m2")),
        ({"dtype": "auto"}, ("auto", "auto")),
        # Static scales belong to E4M3.
        ({"scales": 0.5}, (E4M3, E4M3)),
        ({"scales": KVScales.uniform(2)}, (E4M3, E4M3)),
        ({"scales": 0.5, "key_dtype": E3M4}, (E3M4, E4M3)),
    ],
    ids=str,
)  # fmt: skip
def test_keywords_choose_the_plan(keywords: dict[str, Any], formats: tuple[str, str]) -> None:
    assert make_cache(**keywords).plan[0] == LayerPlan.parse(*formats)


@pytest.mark.parametrize(
    "keywords",
    [
        {"plan": "fp8_e3m4 centered"},
        {"plan": ("int8 rotated centered", "int8")},
        {"plan": LayerPlan.parse("fp8 centered", "fp8"), "scales": 0.5},
        {"plan": {0: LayerPlan.parse("int8", "int8"), 1: LayerPlan.parse("int8 centered", "int8")}},
    ],
    ids=str,
)
@pytest.mark.parametrize("accept_plan", [make_cache, FP8PagedCache, ServingConfig.parse])
def test_a_plan_without_its_centers_is_refused(accept_plan: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"center of K .*choose_plan\(model\), call enable"):
        accept_plan(**keywords)
