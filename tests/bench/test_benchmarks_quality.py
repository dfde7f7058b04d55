"""The authors' benchmarks of predictions: accuracy, latents, and long context."""

import json
import pydoc_data.topics
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import accuracy, latent_accuracy
from benchmarks.gpu.shapes import KINDS as GPU_KINDS
from benchmarks.long import __main__ as long_command
from benchmarks.long import caches
from hf_fp8kv.calibration import calibrate
from hf_fp8kv.formats import DISTINCT
from tests.helpers import command_line

pytestmark = pytest.mark.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


def test_every_format_is_measured():
    """A new format needs no other list."""
    distinct = {fmt.name for fmt in DISTINCT}
    assert set(accuracy.MEASURED) == distinct
    assert {kind.format for kind in GPU_KINDS} == {"auto", *distinct}


def test_accuracy_by_format_scales_and_center(folder, monkeypatch):
    """Static scales are a calibration's, and no scored paragraph is calibrated on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(accuracy, "MEASURED", ("fp8_e4m3",))
    makers = {}
    compare = accuracy.compare_caches
    monkeypatch.setattr(
        accuracy, "compare_caches",
        lambda model, ids, made, **more: makers.update(made) or compare(model, ids, made, **more),
    )  # fmt: skip
    result = accuracy.run_accuracy_suite(
        model, tokenizer, texts=2, prefill=24, score=16, chunk=8, calibrated=300
    )
    rows = {(row["format"], row["scales"], row["centered"]): row for row in result["rows"]}
    kinds = (accuracy.CONSTANT, accuracy.AMAX, *accuracy.STATIC, accuracy.DYNAMIC)
    assert {("fp8_e4m3", kind, center) for kind in kinds for center in (False, True)} < rows.keys()
    for (fmt, kind, _), row in rows.items():
        assert row["tokens"] == 2 * 16
        assert 0 < row["kl"] <= row["kl_max"]
        assert sum(row["kl_by_text"]) / 2 == pytest.approx(row["kl"])
        if fmt == "fp8_e4m3":
            # 2 layers, K and V, 2 heads of 16 and, if dynamic, two bytes for a scale
            assert row["bytes_per_token"] == (144 if kind == accuracy.DYNAMIC else 128)
    topics, settings = pydoc_data.topics.topics, result["settings"]
    expected = calibrate(
        model, [topics[name] for name in settings["calibrated_on"]], tokenizer=tokenizer,
        granularity="head", center=False, dtype="fp8_e4m3", max_tokens=300, max_length=40,
        held_out=0, progress=False,
    )  # fmt: skip
    assert makers["fp8_e4m3, static per head"]().options.scales.digest == expected.digest

    def paragraphs(name: str) -> set[str]:
        parts = (" ".join(part.split()) for part in topics[name].split("\n\n"))
        return {part for part in parts if len(part) >= 80}

    scored = set.union(*map(paragraphs, settings["texts"]))
    assert scored
    assert not any(paragraphs(name) & scored for name in settings["calibrated_on"])


@pytest.mark.full
def test_the_default_stores_latents_better_than_a_scale_per_128_numbers():
    result = latent_accuracy.measure_latent_accuracy(
        texts=1, prefill=64, score=32, layers=2, rank=128
    )
    for kind in latent_accuracy.KINDS:
        rows = {row["cache"]: row for row in result["rows"] if row["model"] == kind}
        default = rows[latent_accuracy.DEFAULT]
        others = rows["fp8_ds_mla (e4m3, scale per 128)"]
        assert default["bytes_per_token"] < others["bytes_per_token"] == 656
        assert 2 * default["kl"] < others["kl"]
        if kind == "large positions":  # saturate under the latent's scale
            saturated = rows["e4m3, the latent's scale for both"]["kl"]
            assert saturated > 10 * rows["latents fp8_e3m4, positions fp8_e4m3"]["kl"]


def test_a_long_text_on_a_command_line(folder, monkeypatch, capsys, tmp_path):
    """A chart of stored results needs no further run."""
    path, picture = tmp_path / "long.json", tmp_path / "kl.png"
    options = ["--model", folder, "--device", "cpu", "--positions", "48,130", "--kinds", "manual",
               "--tasks", "none", "--caches", "default,e4m3,bf16,hqq-int4", "--scored", "16",
               "--texts", "2", "--json", str(path)]  # fmt: skip
    monkeypatch.setattr(caches, "_is_installed", lambda module: False)
    monkeypatch.setattr(sys, "argv", ["long", *options])
    long_command.main()
    result = json.loads(path.read_text())
    assert {"commit", "idle", "hardware", "versions", "date", "command"} <= result.keys()
    assert result["complete"] is True
    missing = {row["cache"]: row["missing"] for row in result["caches"] if row["missing"]}
    assert missing == {"hqq-int4": "not installed: pip install hqq"}
    found = {(r["cache"], r["position"], r["kind"]): r for r in result["predictions"]}
    assert found.keys() == set(product(("default", "e4m3", "bf16"), (48, 130), ("all", "manual")))
    assert {row["tokens"] for row in found.values()} == {2 * 16}
    kl = {cache: found[cache, 130, "all"]["kl"] for cache in ("bf16", "default", "e4m3")}
    assert 0 < kl["bf16"] < kl["default"] < kl["e4m3"]
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["long", "--from", str(path), "--plot", str(picture)])
    long_command.main()
    assert "KL at 130" in capsys.readouterr().out
    assert picture.read_bytes()[1:4] == b"PNG"


def test_the_tables_of_the_docs_are_those_of_the_runs():
    docs = Path(__file__).parents[2] / "docs"
    names = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b")
    paths = [docs / "benchmarks" / f"2026-11-23-long-{name}.json" for name in names]
    results = [json.loads(path.read_text()) for path in paths]
    titles = {row["cache"]: row["title"] for result in results for row in result["caches"]}
    text = (docs / "accuracy.md").read_text()
    for cache, title in titles.items():
        kl, top1 = [], []
        for result in results:
            found = {row["position"]: row for row in result["predictions"]
                     if (row["cache"], row["kind"]) == (cache, "all")}  # fmt: skip
            for row in map(found.get, result["settings"]["positions"]):
                error = row and f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}"
                kl.append(error or "refused")
                top1.append(f"{100 * row['top1']:.1f} %" if row else "refused")
        assert f"\n| {title} | {' | '.join(kl)} |\n" in text
        assert f"\n| {title} | {' | '.join(top1)} |\n" in text
