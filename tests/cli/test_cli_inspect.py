"""Tests of `hf-fp8kv inspect`: the output for scales and plans."""

import pytest

from tests.helpers.planned import PLANS, make_planned_scales
from tests.scales.test_export import make_random_scales


@pytest.mark.parametrize("kind", ["head", "centered-channel"])
def test_json_contains_all_properties_of_the_scales(run, tmp_path, kind):
    scales = make_random_scales(kind)
    scales.save_pretrained(tmp_path)
    output = run.json("inspect", tmp_path)
    assert (output["format"], output["model_type"]) == ("hf_fp8kv", "llama")
    assert (output["warnings"], output["remarks"]) == ([], [])
    assert output["layers"].keys() == {"0", "1", "2"}
    row = output["layers"]["1"]
    layer = scales.layers[1]
    assert row["centered"] == kind.startswith("centered")
    assert row["granularity"] == layer.granularity
    for side, scale in zip("kv", layer.static, strict=True):
        assert row[side]["shape"] == list(scale.shape)
        assert (row[side]["min"], row[side]["max"]) == (scale.min().item(), scale.max().item())
        assert row[side]["amax"] == 448 * row[side]["max"]
        assert row[side].get("values") == (scale.flatten().tolist() if kind == "head" else None)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_a_plan_is_shown(run, tmp_path, is_dynamic):
    make_planned_scales(is_dynamic=is_dynamic).save_pretrained(tmp_path)
    printed, _ = run("inspect", tmp_path)
    assert ("per token" if is_dynamic else "per head") in printed
    assert all(f"1 x {plan}" in printed for plan in PLANS)
    output = run.json("inspect", tmp_path)
    assert output["plan"] == {str(plan): 1 for plan in PLANS}
    assert output["layers"]["1"]["plan"] == ["fp8_e4m3", "fp8_e2m5 rotated"]
    assert (output["layers"]["1"]["k"] is None) is is_dynamic
