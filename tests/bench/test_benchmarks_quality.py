"""Tests of the accuracy benchmarks, and of the tables of results in the docs."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import latent_accuracy, prompts
from benchmarks.outliers import planted_outliers
from hf_fp8kv import LayerPlan, LayerScales, StoragePlan
from hf_fp8kv.card.texts import read_texts
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


def test_prompts_resume_by_passage_and_cache(monkeypatch, tmp_path):
    """An interrupted run keeps each finished row, and a cut off line is measured again."""
    folder = save_tiny_model(tmp_path, positions=512)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(prompts, "SCORED_TOKENS", 16)
    (texts := tmp_path / "texts").mkdir()
    (texts / "a.txt").write_text("a b c d e " * 50)
    (texts / "b.txt").write_text("London is the capital of x y z " * 50)
    path = tmp_path / "rows.jsonl"
    num_scores = 0
    score_text = prompts.score_text

    def score_until_interrupt(*args, **kwargs):
        nonlocal num_scores
        for item in score_text(*args, **kwargs):
            if num_scores == 7:
                raise KeyboardInterrupt
            num_scores += 1
            yield item

    def measure(results=path, caches="QuantizedCache,fp8_e3m4,fp8"):
        return prompts.measure_prompts(
            model, tokenizer, name="tiny", results=results and str(results), caches=caches,
            tokens=64, num_passages=2, texts=str(texts), progress=lambda _message: None,
        )  # fmt: skip

    monkeypatch.setattr(prompts, "score_text", score_until_interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure()
    lines = path.read_text().split("\n")
    # 5 scores and a refusal of the first passage, and 2 scores of the second passage.
    assert len([line for line in lines if line]) == 8
    path.write_text("\n".join(lines)[:-20])
    num_scores = -100
    resumed = measure()["rows"]
    assert num_scores == -100 + 5, "the first passage is complete"
    assert resumed == measure(None)["rows"]
    num_scores = -100
    assert measure()["rows"] == resumed
    assert num_scores == -100, "nothing is missing"

    rows = {row["cache"]: row for row in resumed}
    saved = [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")]
    for cache, prompt in product(("fp8_e3m4", "fp8"), ("exact", "stored")):
        kl = [row["kl"] for row in saved if (row["cache"], row["prompt"]) == (cache, prompt)]
        mean, low, high = rows[cache][prompt]
        assert mean == pytest.approx(sum(kl) / 2)
        assert high - mean == pytest.approx(12.706 * abs(kl[0] - kl[1]) / 2, rel=1e-3)
        assert mean - low == pytest.approx(high - mean)
        if cache == "fp8":
            baseline_kl = [
                row["kl"] for row in saved if (row["cache"], row["prompt"]) == ("fp8_e3m4", prompt)
            ]
            expected_ratio = (kl[0] / baseline_kl[0] * kl[1] / baseline_kl[1]) ** 0.5
            ratio, low, high = rows[cache][f"{prompt}_ratio"]
            assert ratio == pytest.approx(expected_ratio)
            assert low < ratio < high
    assert (rows["QuantizedCache"]["stored"], rows["QuantizedCache"]["growth"]) == (None, None)
    assert "refused" in str([*prompts.format_table(measure()).renderables[0].columns[5].cells])


def test_every_second_passage_begins_inside_a_text(monkeypatch, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path))
    monkeypatch.setattr(prompts, "KINDS", {"code": prompts.KINDS["code"]})
    passages = prompts.read_passages(tokenizer, 2, 100, None)
    first, second = read_texts(tokenizer, "code", 2, 199)
    assert torch.equal(passages["code 1"], first[:, :100])
    assert torch.equal(passages["code 2"], second[:, 99:])


def test_prompts_measure_plans_and_texts_in_files(monkeypatch, tmp_path):
    """A changed plan in the same file is a different storage."""
    folder = save_tiny_model(tmp_path / "model", positions=512)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(prompts, "SCORED_TOKENS", 16)
    (texts := tmp_path / "texts").mkdir()
    (texts / "long.txt").write_text("a b c d e " * 50)
    (texts / "short.txt").write_text("a b")
    plan_path = tmp_path / "plan"

    def measure(num_passages=1):
        return prompts.measure_prompts(
            model, tokenizer, name="tiny", results=str(tmp_path / "rows"), caches="fp8_e3m4",
            plans=[str(plan_path)], tokens=32, num_passages=num_passages, texts=str(texts),
            progress=lambda _message: None,
        )["rows"]  # fmt: skip

    results = []
    for v_format in ("fp8_e3m4", "model"):
        layers = {n: LayerScales(None, None, plan=LayerPlan.parse("int8 rotated", v_format))
                  for n in range(2)}  # fmt: skip
        StoragePlan(layers).save_pretrained(str(plan_path), overwrite=True)
        baseline, row = measure()
        results.append(row["exact"][0])
        assert baseline["more_bytes"] == 0
        assert (row["more_bytes"] > 0.2) == (v_format == "model")
    assert results[0] != results[1]
    with pytest.raises(ConfigError, match="texts: expected 2 files of 48 tokens"):
        measure(2)


DOCS = Path(__file__).parents[2] / "docs"


def load_result(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("prefix", "replaced_caches"),
    [("2026-11-23-long", ("default", "e3m4", "q8_0")), ("2026-11-24-plans", ("default",))],
)
def test_the_tables_of_accuracy_match_the_results(prefix, replaced_caches):
    models = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b")
    results = [load_result(f"{prefix}-{model}") for model in models]
    titles = {row["cache"]: row["title"] for result in results for row in result["caches"]
              if row["cache"] not in replaced_caches}  # fmt: skip
    page = (DOCS / "accuracy.md").read_text()
    for cache, title in titles.items():
        cells = []
        for result in results:
            rows = {row["position"]: row for row in result["predictions"]
                     if (row["cache"], row["kind"]) == (cache, "all")}  # fmt: skip
            for row in map(rows.get, result["settings"]["positions"]):
                kl = row and f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}"
                cells.append(kl or "refused")
        assert f"\n| {title} | {' | '.join(cells)} |\n" in page


# -- GPUs ------------------------------------------------------------------------------------------

# Rows of a run by section, case and contender.
Rows = dict[tuple[str, str, str], dict[str, Any]]


def load_rows(*names: str) -> Rows:
    """Load runs of one GPU. A later run replaces rows, and all compiled steps with pages."""
    rows: Rows = {}
    for name in names:
        rows = {key: row for key, row in rows.items() if not re.match("FP8.* compiled", key[2])}
        new_rows = load_result(name)["rows"]
        rows |= {(row["section"], row["case"], row["name"]): row for row in new_rows}
    return rows


def find_best_row(rows: Rows, section: str, case: str, contenders: str, field: str) -> Any:
    """Return the row of the best of `contenders`, which are separated by commas, or None."""
    keys = [(section, case, name) for name in contenders.split(",")]
    measured_rows = [rows[key] for key in keys if field in rows.get(key, {})]
    choose = max if field == "tokens_per_s" else min
    return choose(measured_rows, key=lambda row: row[field], default=None)


def test_the_tables_of_gpus_match_the_results():
    """Check README.md and docs/performance.md. Empty cells were not measured.

    The first columns are from an H200. The last columns are ratios on an H200 and on an H100.
    """
    # Steps at 1 x 1k depend on the host, so all of them are from the run that measured all caches.
    h200_rows, new_rows = load_rows("2026-11-26-gpu-h200"), load_rows("2026-11-27-gpu-h200")
    h200_rows |= {key: row for key, row in new_rows.items() if key[:2] != ("end to end", "1 x 1k")}
    h100_rows = load_rows("2026-11-26-gpu-h100", "2026-11-26-gpu-h100-end-to-end")

    def format_cell(section, case, contenders, field="us", has_share=False):
        row = find_best_row(h200_rows, section, case, contenders, field)
        if row is None:
            return ""
        value = row[field] / 1e9 if field == "peak_bytes" else row[field]
        text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        return f"{text} ({row['of_read']:.2f})" if has_share else text

    def format_ratios(section, case, contenders, *baselines, field="us"):
        for rows, baseline in product((h200_rows, h100_rows), baselines):
            row = find_best_row(rows, section, case, contenders, field)
            base_row = find_best_row(rows, section, case, baseline, field)
            yield f"{row[field] / base_row[field]:.2f}" if row and base_row else ""

    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    flash, cudnn = "sdpa flash,sdpa flash folded", "sdpa cudnn,sdpa cudnn folded"
    paged, auto, dynamic = "FP8PagedCache", "FP8PagedCache auto", "DynamicCache flash eager"
    for ours, baseline, claim in (
        (f"{paged} eager", dynamic, "decodes at {:.2f} of its speed"),
        (f"{paged} compiled", f"{auto} compiled", "{:.2f} times as fast as our 16-bit cache"),
        (f"{paged} compiled", dynamic, "{:.1f} times as fast as the script before"),
    ):
        ratio, _ = format_ratios("end to end", "8 x 32k", ours, baseline, field="tokens_per_s")
        assert claim.format(float(ratio)) in readme
    page = (DOCS / "performance.md").read_text()
    for case in ("8 x 32k", "64 x 32k", "1 x 256k", "2 x 128k", "98 x 4k", "1 x 32k", "1 x 1k"):
        columns = ("e4m3", "e3m4", "int8", "bf16 pages", flash, cudnn)
        cells = [format_cell("decode", case, contenders, has_share=True) for contenders in columns]
        cells += format_ratios("decode", case, "e4m3", f"{flash},{cudnn}")
        assert f"\n| {case} | {' | '.join(cells)} |\n" in page
    for num_stored, num_new in product((8192, 0, 32768), (64, 512, 2048, 8192)):
        case = f"{num_new} over {num_stored}"
        columns = ("e4m3", "bf16 pages", "sdpa flash", "sdpa cudnn")
        cells = [format_cell("extend", case, contender) for contender in columns]
        cells += format_ratios("extend", case, "e4m3", "sdpa flash", "sdpa cudnn")
        assert f"\n| {num_new:,} over {num_stored:,} | {' | '.join(cells)} |\n" in page
    for title, contender in (
        ("`FP8PagedCache`, compiled", f"{paged} compiled"),
        ("16-bit pages, compiled", f"{auto} compiled"),
        ("`StaticCache` and SDPA, compiled", "StaticCache (repeats K and V) compiled"),
        ("`FP8PagedCache`, eager", f"{paged} eager"),
        ("16-bit pages, eager", f"{auto} eager"),
        ("`DynamicCache` and flash attention, eager", dynamic),
    ):
        cells = [format_cell("end to end", case, contender, "tokens_per_s")
                 for case in ("8 x 32k", "1 x 32k", "8 x 1k", "1 x 1k")]  # fmt: skip
        cells.insert(1, format_cell("end to end", "8 x 32k", contender, "peak_bytes"))
        assert f"\n| {title} | {' | '.join(cells)} |\n" in page
    for num_heads, tokens in product((16, 128), ("1 x 16k", "16 x 16k", "16 x 32k")):
        case = f"{num_heads} heads, {tokens}"
        columns = ("e3m4", "e3m4 kernel", "absorbed in torch", "DynamicCache")
        cells = [format_cell("latent", case, contender) for contender in columns]
        assert any(
            line.startswith(f"| {case} | ") and f" | {' | '.join(cells)} | " in line
            for line in page.splitlines()
        )
