"""Tests of scales with a storage plan: validation, files, and formats that cannot store them."""

import math
from pathlib import Path

import pytest
import torch

from hf_fp8kv.errors import ConfigError, ScaleError
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.scales import SCALE_FORMATS, KVScales, LayerScales
from hf_fp8kv.scales.checkpoint.checkpoint import KV_FILE
from tests.helpers.planned import PLANS, make_planned_scales
from tests.scales.test_scales import assert_same_scales
from tests.scales.test_weights_digest import edit_metadata, read_metadata

ONE = torch.tensor(1.0)
CENTERED_PLAN = LayerPlan.parse("int8 rotated centered", "int8")
PLAIN_PLAN = LayerPlan.parse("int8", "int8")


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_a_plan_is_saved_in_the_package_file(tmp_path: Path, is_dynamic: bool) -> None:
    scales = make_planned_scales(is_dynamic=is_dynamic)
    scales.save_pretrained(tmp_path)
    for loaded in (KVScales.from_pretrained(tmp_path), KVScales.from_file(tmp_path / KV_FILE)):
        assert_same_scales(loaded, scales)
        assert loaded.plan == scales.plan == dict(enumerate(PLANS))
        assert loaded.is_dynamic is is_dynamic
        assert loaded.weights_digest == scales.weights_digest
        assert loaded.digest == scales.digest
    assert {layer.granularity for layer in scales.layers.values()} == {
        "token" if is_dynamic else "head"
    }
    assert read_metadata(tmp_path / KV_FILE)["plan"]["0"] == [
        "fp8_e2m5 rotated centered",
        "int8 rotated",
    ]
    assert "1 x K int8 rotated, V fp8_e3m4" in repr(scales)


PROTECTION = {"kl": 1, "unprotected_kl": 1, "extra_bytes": 0, "sides": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": None}, "a file of scales as save_pretrained writes it"),
        ({"plan": {"1": ["fp8_e4m3", "int8"]}}, "a plan in all layers"),
        ({"plan": {"0": ["int9", "int8"]}}, "as save_pretrained writes it, got ConfigError"),
        ({"version": 3}, "Update hf_fp8kv"),
        ({"weights_digest": "ax"}, "a file of scales as save_pretrained writes it"),
        ({"dtype": "int8"}, "Update hf_fp8kv"),
        ({"protection": {"kl": 0.25}}, "as save_pretrained writes it, got TypeError"),
        ({"protection": [1]}, "as save_pretrained writes it, got TypeError"),
        ({"protection": PROTECTION | {"more": 1}}, "as save_pretrained writes it, got TypeError"),
        ({"protection": PROTECTION | {"kl": 10**400}}, "as save_pretrained .* got OverflowError"),
        *(
            ({"protection": PROTECTION | fields}, "expected finite numbers and names")
            for fields in ({"kl": math.nan}, {"kl": True}, {"kl": "0.5"}, {"sides": "abc"})
        ),
    ],
    ids=str,
)
def test_damaged_plans_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    make_planned_scales().save_pretrained(tmp_path)
    path = tmp_path / KV_FILE
    edit_metadata(path, lambda metadata: metadata | change)
    with pytest.raises(ScaleError, match=message):
        KVScales.from_file(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None), "K scale"),
        ((None, ONE, None, "", PLAIN_PLAN), "K scale"),
        ((ONE, None, None, "", PLAIN_PLAN), "V scale"),
        ((ONE, ONE, None, "", CENTERED_PLAN), "a center of K if"),
        ((ONE, ONE, None, "", LayerPlan.parse("int8", "int8 centered")), "a center of K if"),
        ((ONE, ONE, None, "", "int8"), "expected a LayerPlan"),
        ((ONE, ONE, torch.full((2, 4), float("nan"))), "center of K .*expected finite"),
        ((ONE, ONE, torch.ones(4)), "center of K .*expected the shape"),
        ((torch.ones(4, 1), torch.ones(2, 1)), "the same number of heads"),
    ],
    ids=str,
)
def test_mismatched_scales_and_plans_are_refused(arguments: tuple, message: str) -> None:
    error_type = ConfigError if message == "expected a LayerPlan" else ScaleError
    with pytest.raises(error_type, match=message):
        LayerScales(*arguments)


@pytest.mark.parametrize(
    "layers",
    [
        [LayerScales(ONE, ONE), LayerScales(ONE, ONE, plan=PLAIN_PLAN)],
        [LayerScales(ONE, ONE, plan=PLAIN_PLAN), LayerScales(None, None, plan=PLAIN_PLAN)],
    ],
)
def test_all_layers_or_none_have_a_plan_and_static_scales(layers: list[LayerScales]) -> None:
    with pytest.raises(ScaleError, match="in all layers or in none, got none in layers"):
        KVScales(dict(enumerate(layers)))


@pytest.mark.parametrize("format", [name for name in SCALE_FORMATS if name != "hf_fp8kv"])
def test_rotated_and_dynamic_scales_are_not_saved_for_servers(tmp_path: Path, format: str) -> None:
    with pytest.raises(ScaleError, match=r"rotated values in layers 0, 1, 2.*Save as 'hf_fp8kv'"):
        make_planned_scales().save_pretrained(tmp_path, format=format)
    with pytest.raises(ScaleError, match=r"each token.*Save as 'hf_fp8kv'"):
        KVScales({0: LayerScales(None, None, plan=PLAIN_PLAN)}).save_pretrained(
            tmp_path, format=format
        )
    assert not list(tmp_path.iterdir())


def test_scales_of_unrotated_values_are_saved_for_servers(tmp_path: Path, caplog) -> None:
    scales = KVScales({0: LayerScales(2 * ONE, 3 * ONE, plan=PLAIN_PLAN)}, model_type="llama")
    scales.save_pretrained(tmp_path, format="tgi")
    assert "the formats of the plan are left out" in caplog.text
    loaded = KVScales.from_pretrained(tmp_path)
    assert (loaded.layers[0].k, loaded.layers[0].v, loaded.plan) == (2, 3, None)
