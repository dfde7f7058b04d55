"""Tests of model cards: the description of the scales, and the parts of a card that are kept."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from hf_fp8kv.scales import KVScales, LayerScales
from tests.cli.test_scales_table import make_report
from tests.helpers import server_rules
from tests.scales.test_export import random_scales

OLD = """---
license: mit
tags:
- mine
my_entry:
  nested: 1
---
# My model

Text with Grüße.
"""


def write_card(model: Path, target: Path, old: str | None, scales: KVScales, **options) -> str:
    """Save a copy of a model whose card is `old`, and return the card of the copy."""
    source = Path(shutil.copytree(model, target.parent / f"{target.name}-source"))
    if old is not None:
        (source / "README.md").write_bytes(old.encode("utf-8", "surrogateescape"))
    scales.save_pretrained(target, checkpoint=source, **options)
    return (target / "README.md").read_bytes().decode("utf-8", "surrogateescape")


def test_a_card_describes_the_scales(model, tmp_path):
    card = ModelCard(
        write_card(
            model, tmp_path / "copy", None, random_scales("tensor"),
            format="compressed-tensors", base_model="org/base",
        )
    )  # fmt: skip
    assert card.data.base_model == "org/base"
    assert card.data.tags == ["fp8", "kv-cache", "compressed-tensors"]
    assert "3 layers, per tensor" in card.text
    assert 'FP8PagedCache(model.config, scales="copy")' in card.text
    assert "vllm serve copy --kv-cache-dtype fp8\n" in card.text
    assert "sglang.launch_server --model-path copy " in card.text


def test_servers_that_cannot_load_the_scales_are_omitted(model, tmp_path):
    heads = random_scales("head")
    card = write_card(model, tmp_path / "copy", None, heads, format="compressed-tensors")
    assert "vllm serve" in card
    assert "sglang" not in card
    with pytest.raises(server_rules.Refused, match="only 8-bit floats per tensor"):
        server_rules.sglang(tmp_path / "copy")


def test_an_existing_card_is_extended_and_its_section_is_replaced(model, tmp_path):
    first = write_card(model, tmp_path / "1", OLD, random_scales("tensor"), format="autofp8")
    second = write_card(model, tmp_path / "2", first + "\nMore.\n", random_scales("head"))
    for text in (first, second):
        card = ModelCard(text)
        assert card.data.license == "mit"
        assert card.data["my_entry"] == {"nested": 1}
        assert card.data.tags[:3] == ["mine", "fp8", "kv-cache"]
        assert card.text.startswith("# My model\n\nText with Grüße.\n\n")
        assert card.text.count("## FP8 KV cache") == 1
    assert "per head" in second
    assert "per tensor" not in second
    assert second.endswith("\n\nMore.\n")
    third = write_card(model, tmp_path / "3", second, random_scales("head"))
    assert third.replace('"3"', '"2"').replace("serve 3 ", "serve 2 ") == second


@pytest.mark.parametrize(
    "old",
    [
        "---\ntags: [a\n---\n# Mine\n",
        "---\n- a\n---\n# Mine\n",
        "---\n- a\n---",
        "---\nmodel-index: 3\n---\n# Mine\n",
        "\udcff not UTF-8\n",
        "text <!-- hf_fp8kv: KV cache --> without its end\n",
    ],
)
def test_a_damaged_card_is_preserved(model, tmp_path, old):
    card = write_card(model, tmp_path / "copy", old, random_scales("tensor"))
    assert old.rstrip() in card
    assert "## FP8 KV cache" in card


@pytest.mark.parametrize("text", ["license: mit", "license: mit\nbase_model: org/mine"])
def test_a_card_with_only_metadata_keeps_it(model, tmp_path, text):
    old = f"---\n{text}\n---"
    card = write_card(
        model, tmp_path / "copy", old, random_scales("tensor"), base_model="org/other"
    )  # fmt: skip
    assert card.count("license: mit") == card.count("base_model:") == 1
    assert ModelCard(card).data.base_model == ("org/mine" if "mine" in text else "org/other")


def test_measurements_are_shown_only_for_the_measured_scales(model, tmp_path):
    layers = {i: LayerScales(torch.full((2, 1), 0.5), torch.tensor(0.25)) for i in range(3)}
    layers[1] = LayerScales(torch.tensor([[0.5], [0.75]]), torch.tensor(0.25))
    scales = KVScales(layers, model_type="llama")
    scales = replace(scales, report=make_report(scales_digest=scales.digest))
    exact = write_card(model, tmp_path / "exact", None, scales)
    assert "calibrated on 5000 tokens of 2 texts" in exact
    assert "static fp8_e4m3: 3.00e-03 nats, same top token 96.2%" in exact
    assert "unquantized:" not in exact
    reduced = write_card(model, tmp_path / "reduced", None, scales, format="autofp8")
    assert "calibrated on 5000 tokens" in reduced
    assert "nats" not in reduced
    assert "the largest scale of each layer is written" in reduced
    assert json.loads((tmp_path / "reduced" / "config.json").read_text())["quantization_config"]
