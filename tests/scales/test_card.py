"""Tests of model cards: the description of scales, and the parts of a card that are preserved."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_fp8kv.scales import KVScales
from tests.scales.test_export import random_scales

OLD_CARD = """---
license: mit
tags:
- mine
my_entry:
  nested: 1
---
# My model

Text with Grüße.
"""


def save_card(folder: Path, target: Path, old_card: str | None, scales: KVScales, **options) -> str:
    """Save scales with a copy of a model whose card is `old_card`, and return the new card."""
    source = Path(shutil.copytree(folder, target.parent / f"{target.name}-source"))
    if old_card is not None:
        (source / "README.md").write_bytes(old_card.encode("utf-8", "surrogateescape"))
    scales.save_pretrained(target, checkpoint=source, **options)
    return (target / "README.md").read_bytes().decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("kind", "format", "expected", "absent"),
    [
        (
            "tensor",
            "compressed-tensors",
            [
                "3 layers, per tensor",
                'FP8PagedCache(model.config, scales="copy")',
                "vllm serve copy --kv-cache-dtype fp8\n",
                "sglang.launch_server --model-path copy ",
            ],
            "the largest scale",
        ),
        # SGLang reads only scales per tensor.
        ("head", "compressed-tensors", ["3 layers, per head", "vllm serve"], "sglang"),
    ],
)
def test_a_card_describes_the_scales(model_folder, tmp_path, kind, format, expected, absent):
    options = {"format": format, "base_model": "org/base"}
    card = ModelCard(
        save_card(model_folder, tmp_path / "copy", None, random_scales(kind), **options)
    )
    assert card.data.base_model == "org/base"
    assert card.data.tags == ["fp8", "kv-cache", format]
    assert all(text in card.text for text in expected)
    assert absent not in card.text


def test_an_existing_card_is_extended_and_its_section_is_replaced(model_folder, tmp_path):
    scales, new_scales = random_scales("tensor"), random_scales("head")
    extended_card = save_card(model_folder, tmp_path / "1", OLD_CARD, scales, format="autofp8")
    replaced_card = save_card(model_folder, tmp_path / "2", extended_card + "\nMore.\n", new_scales)
    for text in (extended_card, replaced_card):
        card = ModelCard(text)
        assert card.data.license == "mit"
        assert card.data["my_entry"] == {"nested": 1}
        assert card.data.tags[:3] == ["mine", "fp8", "kv-cache"]
        assert card.text.startswith("# My model\n\nText with Grüße.\n\n")
        assert card.text.count("## FP8 KV cache") == 1
    assert "per head" in replaced_card
    assert "per tensor" not in replaced_card
    assert replaced_card.endswith("\n\nMore.\n")


@pytest.mark.parametrize(
    "old_card",
    [
        "---\ntags: [a\n---\n# Mine\n",
        "---\n- a\n---\n# Mine\n",
        "---\n1: a\n---\n# Mine\n",
        "\udcff not UTF-8\n",
        "text <!-- hf_fp8kv: KV cache --> without its end\n",
    ],
)
def test_a_damaged_card_is_preserved(model_folder, tmp_path, old_card):
    card = save_card(model_folder, tmp_path / "copy", old_card, random_scales("tensor"))
    assert old_card.rstrip() in card
    assert "## FP8 KV cache" in card
