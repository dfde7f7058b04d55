"""Tests of the accuracy benchmarks, and of the tables of results in the docs."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import latent_accuracy
from benchmarks.outliers import planted_outliers
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text


@pytest.mark.full
def test_the_default_stores_latents_better_than_a_scale_per_128_values():
    result = latent_accuracy.measure_latent_accuracy(
        num_texts=1,
        prefill_tokens=64,
        scored_tokens=32,
        num_layers=2,
        rank=128,
        progress=lambda _message: None,
    )
    for kind in latent_accuracy.MODEL_KINDS:
        rows = {row["cache"]: row for row in result["rows"] if row["model"] == kind}
        default = rows[latent_accuracy.DEFAULT_CACHE]
        scale_per_128 = rows["fp8_ds_mla (e4m3, scale per 128)"]
        assert default["bytes_per_token"] < scale_per_128["bytes_per_token"] == 656
        assert 2 * default["kl"] < scale_per_128["kl"]
        if kind == "large positions":  # RoPE parts saturate with the latent's scale
            saturated = rows["e4m3, the latent's scale for both"]["kl"]
            assert saturated > 10 * rows["latents fp8_e3m4, positions fp8_e4m3"]["kl"]


# Outliers also enlarge the bias of K. The RoPE pairs of the second model are interleaved.
@pytest.mark.parametrize("name", ["qwen2", "cohere"])
def test_a_model_with_planted_outliers_gives_the_same_logits(name):
    model, _ = build_variant(name, num_hidden_layers=2)
    ids = torch.arange(4, 44)[None]
    keys = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, args, out: keys.append(out)
    )
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with planted_outliers(model, 50.0):
            outlier_logits = model(input_ids=ids).logits
        restored_logits = model(input_ids=ids).logits
    torch.testing.assert_close(outlier_logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(restored_logits, logits)
    assert (keys[-2] / keys[0]).abs().max() > 25


@pytest.mark.parametrize(
    ("runs", "replaced_caches"),
    [("2026-11-23-long", ("default", "e3m4", "q8_0")), ("2026-11-24-plans", ())],
)
def test_the_tables_of_the_docs_match_the_runs(runs, replaced_caches):
    docs = Path(__file__).parents[2] / "docs"
    names = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b")
    paths = [docs / "benchmarks" / f"{runs}-{name}.json" for name in names]
    results = [json.loads(path.read_text()) for path in paths]
    titles = {row["cache"]: row["title"] for result in results for row in result["caches"]
              if row["cache"] not in replaced_caches}  # fmt: skip
    text = (docs / "accuracy.md").read_text()
    for cache, title in titles.items():
        kl = []
        for result in results:
            rows = {row["position"]: row for row in result["predictions"]
                     if (row["cache"], row["kind"]) == (cache, "all")}  # fmt: skip
            for row in map(rows.get, result["settings"]["positions"]):
                error = row and f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}"
                kl.append(error or "refused")
        assert f"\n| {title} | {' | '.join(kl)} |\n" in text


def test_the_tables_of_a_gpu_match_the_run():
    """Check README.md and docs/performance.md. Empty cells were not measured.

    The last columns are ratios on an H200 and on an H100. The second run on a GPU replaces rows of
    the first run. The compiled steps with pages of the H100's first run are not shown.
    """
    root = Path(__file__).parents[2]

    def load_runs(*file_names):
        rows: dict[tuple[str, str, str], Any] = {}
        for file_name in file_names:
            rows = {key: row for key, row in rows.items() if not re.match("FP8.* compiled", key[2])}
            result = json.loads((root / "docs" / "benchmarks" / f"{file_name}.json").read_text())
            rows |= {(row["section"], row["case"], row["name"]): row for row in result["rows"]}
        return rows

    # Steps at 1 x 1k depend on the host, so all of them are from the run that measured all caches.
    rows, new_rows = load_runs("2026-11-26-gpu-h200"), load_runs("2026-11-27-gpu-h200")
    rows |= {key: row for key, row in new_rows.items() if key[:2] != ("end to end", "1 x 1k")}
    runs = rows, load_runs("2026-11-26-gpu-h100", "2026-11-26-gpu-h100-end-to-end")

    def find_row(rows, section, case, names, field):
        measured_rows = [rows[key] for name in names.split(",")
                 if field in rows.get(key := (section, case, name), {})]  # fmt: skip
        order = -1 if field == "tokens_per_s" else 0
        return sorted(measured_rows, key=lambda row: row[field])[order] if measured_rows else None

    def format_cell(section, case, names, field="us", has_share=False):
        row = find_row(rows, section, case, names, field)
        if row is None:
            return ""
        value = row[field] / 1e9 if field == "peak_bytes" else row[field]
        text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        return f"{text} ({row['of_read']:.2f})" if has_share else text

    def format_ratio(rows, section, case, names, other_names, field="us"):
        row, other_row = (find_row(rows, section, case, x, field) for x in (names, other_names))
        return f"{row[field] / other_row[field]:.2f}" if row and other_row else ""

    readme = (root / "README.md").read_text()
    flash, cudnn = "sdpa flash,sdpa flash folded", "sdpa cudnn,sdpa cudnn folded"
    paged, auto, dynamic = "FP8PagedCache", "FP8PagedCache auto", "DynamicCache flash eager"
    for title, section, case, *columns, field in (
        ("decode attention, 8 x 32k tokens, µs", "decode", "8 x 32k",
         "e4m3", "bf16 pages", f"{flash},{cudnn}", "us"),
        ("attention, 2,048 tokens over 8,192 stored, µs", "extend", "2048 over 8192",
         "e4m3", "bf16 pages", f"{flash},{cudnn}", "us"),
        ("attention, a prompt of 8,192 tokens, µs", "extend", "8192 over 0",
         "e4m3", "bf16 pages", f"{flash},{cudnn}", "us"),
        ("`generate()`, 8 x 32k, ours compiled, tokens/s", "end to end", "8 x 32k",
         f"{paged} compiled", f"{auto} compiled", dynamic, "tokens_per_s"),
        ("`generate()`, 1 x 1k, ours compiled, tokens/s", "end to end", "1 x 1k",
         f"{paged} compiled", f"{auto} compiled", dynamic, "tokens_per_s"),
        ("`generate()`, 8 x 32k, eager, tokens/s", "end to end", "8 x 32k",
         f"{paged} eager", f"{auto} eager", dynamic, "tokens_per_s"),
        ("`generate()`, 8 x 1k, eager, tokens/s", "end to end", "8 x 1k",
         f"{paged} eager", f"{auto} eager", dynamic, "tokens_per_s"),
        ("decode step of MLA, 128 heads, 16 x 16k tokens, µs", "latent", "128 heads, 16 x 16k",
         "e3m4", "bf16 pages", "absorbed in torch,DynamicCache", "us"),
    ):  # fmt: skip
        cells = [format_cell(section, case, names, field) for names in columns]
        our_names, _, best_names = columns
        cells += [format_ratio(run, section, case, our_names, best_names, field) for run in runs]
        assert f"\n| {title} | {' | '.join(cells)} |\n" in readme
    page = (root / "docs" / "performance.md").read_text()
    for case in ("8 x 32k", "64 x 32k", "1 x 256k", "2 x 128k", "98 x 4k", "1 x 32k", "1 x 1k"):
        contenders = ("e4m3", "e3m4", "int8", "bf16 pages", flash, cudnn)
        cells = [format_cell("decode", case, names, has_share=True) for names in contenders]
        cells += [format_ratio(run, "decode", case, "e4m3", f"{flash},{cudnn}") for run in runs]
        assert f"\n| {case} | {' | '.join(cells)} |\n" in page
    for num_stored, num_new in product((8192, 0, 32768), (64, 512, 2048, 8192)):
        contenders = ("e4m3", "bf16 pages", "sdpa flash", "sdpa cudnn")
        case = f"{num_new} over {num_stored}"
        cells = [format_cell("extend", case, names) for names in contenders]
        cells += [format_ratio(run, "extend", case, "e4m3", base)
                  for run in runs for base in ("sdpa flash", "sdpa cudnn")]  # fmt: skip
        assert f"\n| {num_new:,} over {num_stored:,} | {' | '.join(cells)} |\n" in page
    for title, name in (
        ("`FP8PagedCache`, compiled", f"{paged} compiled"),
        ("16-bit pages, compiled", f"{auto} compiled"),
        ("`StaticCache` and SDPA, compiled", "StaticCache (repeats K and V) compiled"),
        ("`FP8PagedCache`, eager", f"{paged} eager"),
        ("16-bit pages, eager", f"{auto} eager"),
        ("`DynamicCache` and flash attention, eager", dynamic),
    ):
        cells = [format_cell("end to end", case, name, "tokens_per_s")
                 for case in ("8 x 32k", "1 x 32k", "8 x 1k", "1 x 1k")]  # fmt: skip
        cells.insert(1, format_cell("end to end", "8 x 32k", name, "peak_bytes"))
        assert f"\n| {title} | {' | '.join(cells)} |\n" in page
    for heads, tokens in product((16, 128), ("1 x 16k", "16 x 16k", "16 x 32k")):
        case = f"{heads} heads, {tokens}"
        contenders = ("e3m4", "e3m4 kernel", "absorbed in torch", "DynamicCache")
        cells = [format_cell("latent", case, name) for name in contenders]
        assert any(
            line.startswith(f"| {case} | ") and f" | {' | '.join(cells)} | " in line
            for line in page.splitlines()
        )
