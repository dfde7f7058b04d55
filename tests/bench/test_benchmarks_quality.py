"""Tests of the accuracy benchmarks, and of the tables of results in the docs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import drafts, latent_accuracy, prompts
from benchmarks.outliers import planted_outliers
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.errors import ConfigError
from tests.helpers.command_line import save_tiny_model
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text


@pytest.mark.full
def test_the_default_stores_latents_better_than_a_scale_per_128_values():
    result = latent_accuracy.measure_latent_accuracy(
        num_texts=1, prefill_tokens=64, scored_tokens=32, num_layers=2, rank=128,
        progress=lambda _message: None,
    )  # fmt: skip
    for kind in latent_accuracy.MODEL_KINDS:
        rows = {row["cache"]: row for row in result["rows"] if row["model"] == kind}
        default_row = rows[latent_accuracy.DEFAULT_CACHE]
        per_128_row = rows["fp8_ds_mla (e4m3, scale per 128)"]
        assert default_row["bytes_per_token"] < per_128_row["bytes_per_token"] == 656
        assert 2 * default_row["kl"] < per_128_row["kl"]
        if kind == "large positions":  # RoPE parts saturate with the latent's scale
            saturated_kl = rows["e4m3, the latent's scale for both"]["kl"]
            assert saturated_kl > 10 * rows["latents fp8_e3m4, positions fp8_e4m3"]["kl"]


def test_a_step_yields_the_accepted_drafts_and_a_token():
    acceptance = torch.tensor([1.0, 0.5, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0])
    assert drafts.NUM_DRAFTED == 5
    assert drafts.count_tokens(acceptance).tolist() == [2.75, 1.75, 1.5, 1.0]


def test_a_cache_costs_drafts_at_most_the_total_variation():
    model, _ = build_variant("llama", num_hidden_layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)  # predictions depend on attention
    draft = drafts.round_weights(model)
    names = (drafts.FLOOR, "default", "fp8-1.0")
    contenders = {name: drafts.CONTENDERS[name] for name in names}
    texts = []
    with paged_attention(model), paged_attention(draft):
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(4, 90, (1, 64), generator=generator)
            texts.append(
                drafts.score_context(model, draft, ids, contenders, scored=16, exit_layers=1)
            )
    rows = drafts.summarize(texts, 64)
    assert len(rows) == 2 * len(names)
    by_cache = {row["cache"]: row for row in rows if row["draft"] == drafts.ROUNDED}
    exact = by_cache[drafts.FLOOR]
    assert exact["low"] == exact["ratio"] == exact["high"] == 1
    assert 0 == exact["kl"] < by_cache["default"]["kl"] < by_cache["fp8-1.0"]["kl"]
    for row in by_cache.values():
        assert abs(exact["acceptance"] - row["acceptance"]) <= row["total_variation"] + 1e-6
        assert row["low"] <= row["ratio"] <= row["high"]


def test_a_model_with_planted_outliers_gives_the_same_logits():
    model, _ = build_variant("qwen2", num_hidden_layers=2)  # outliers also enlarge its bias of K
    ids = torch.arange(4, 44)[None]
    keys = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda _module, _inputs, output: keys.append(output)
    )
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with planted_outliers(model, 50.0):
            outlier_logits = model(input_ids=ids).logits
        restored_logits = model(input_ids=ids).logits
    torch.testing.assert_close(outlier_logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(restored_logits, logits)
    # The last call has restored weights, and the call before it has outliers.
    assert (keys[-2] / keys[0]).abs().max() > 25
    interleaved_model, _ = build_variant("cohere", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="i and i"), planted_outliers(interleaved_model, 50.0):
        pass


def test_prompts_are_compared_by_passage_and_cache(monkeypatch, tmp_path):
    """Ratios are relative to the baseline, and a cache may refuse a stored prompt."""
    folder = save_tiny_model(tmp_path / "model", positions=512)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(prompts, "SCORED_TOKENS", 16)
    (texts := tmp_path / "texts").mkdir()
    (texts / "a.txt").write_text("a b c d e " * 50)
    (texts / "b.txt").write_text("London is the capital of x y z " * 50)
    result = prompts.measure_prompts(
        model, tokenizer, caches="QuantizedCache,fp8_e3m4,fp8", prompt_tokens=64, num_passages=2,
        text_folder=str(texts), factor=2.0, progress=lambda _message: None,
    )  # fmt: skip
    quantized_row, baseline_row, fp8_row = result["rows"]
    assert quantized_row["stored, 1e-3"] == "refused"
    for prompt in ("exact", "stored"):
        mean, low, high = fp8_row[f"{prompt}, 1e-3"]
        assert mean == pytest.approx(1e3 * sum(fp8_row[f"{prompt}_kl"]) / 2)
        assert high - mean == pytest.approx(mean - low)
        assert baseline_row[f"{prompt}, of fp8_e3m4"] is None
        assert fp8_row[f"{prompt}, of fp8_e3m4"][0] > 1


DOCS = Path(__file__).parents[2] / "docs"


def load_result(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())


def load_rows(*names: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Load runs of one GPU by section, case and contender. A later run replaces rows."""
    rows = [row for name in names for row in load_result(name)["rows"]]
    return {(row["section"], row["case"], row["name"]): row for row in rows}


@pytest.mark.parametrize("case", ["8 x 32k", "64 x 32k", "1 x 256k"])
def test_the_table_of_decode_steps_on_a_gpu_matches_the_results(case):
    rows = load_rows("2026-11-26-gpu-h200", "2026-11-27-gpu-h200")
    cells = []
    for name in ("e4m3", "e3m4", "int8", "bf16 pages"):
        row = rows["decode", case, name]
        time = f"{row['us']:,.0f}" if row["us"] >= 100 else f"{row['us']:.1f}"
        cells.append(f"{time} ({row['of_read']:.2f})")
    assert f"\n| {case} | {' | '.join(cells)} | " in (DOCS / "performance.md").read_text()


def test_the_readme_names_the_speed_of_generate_on_a_gpu():
    rows = load_rows("2026-11-26-gpu-h200", "2026-11-27-gpu-h200")
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    paged, auto, dynamic = "FP8PagedCache", "FP8PagedCache auto", "DynamicCache flash eager"
    for ours, baseline, claim in (
        (f"{paged} eager", dynamic, "decodes at {:.2f} of its speed"),
        (f"{paged} compiled", f"{auto} compiled", "{:.2f} times as fast as our 16-bit cache"),
        (f"{paged} compiled", dynamic, "{:.1f} times as fast as the script before"),
    ):
        ours_row, base_row = (rows["end to end", "8 x 32k", name] for name in (ours, baseline))
        ratio = f"{ours_row['tokens_per_s'] / base_row['tokens_per_s']:.2f}"
        assert claim.format(float(ratio)) in readme
