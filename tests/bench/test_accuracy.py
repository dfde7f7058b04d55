"""The accuracy suite: which rows it has, and that each one measures what it says."""

import io
import json
import pydoc_data.topics
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.accuracy import AMAX, CONSTANT, DYNAMIC, MEASURED, STATIC, run_accuracy_suite
from hf_fp8kv import FP8PagedCache
from hf_fp8kv.bench import accuracy
from hf_fp8kv.bench.quality import CACHES, DEFAULT, STOCK
from hf_fp8kv.calibration import calibrate
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import LayerPlan
from tests.helpers import command_line

pytestmark = pytest.mark.text

PREFILL, SCORED, TEXTS, CALIBRATED = 24, 16, 5, 600
SMALL: dict[str, Any] = {
    "prefill": PREFILL, "score": SCORED, "chunk": 8, "calibrated": CALIBRATED
}  # fmt: skip
SCALES = (CONSTANT, *STATIC, DYNAMIC)
ALL = [
    (fmt, scales, centered)
    for fmt in MEASURED
    for scales in (CONSTANT, *([AMAX] if fmt == "fp8_e4m3" else []), *STATIC, DYNAMIC)
    for centered in (False, True)
]
Key = tuple[str, str, bool]


class Run(NamedTuple):
    """A run of the suite on a tiny model, and what it did."""

    model: PreTrainedModel
    tokenizer: Any
    result: dict[str, Any]
    rows: dict[Key, dict[str, Any]]
    makers: dict[str, Callable[[], Any]]
    scored: list[torch.Tensor]
    said: list[tuple[str, float]]

    def cache(self, fmt: str, scales: str, centered: bool) -> Any:
        """A cache as that row had it."""
        return self.makers[f"{fmt}, {scales}{', K centered' if centered else ''}"]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(folder) -> Run:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    makers: dict[str, Callable[[], Any]] = {}
    scored, said = [], []
    compare = accuracy.compare_caches

    def spy(model, ids, caches, **more):
        makers.update(caches)
        scored.append(ids)
        return compare(model, ids, caches, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "compare_caches", spy)
        result = run_accuracy_suite(
            model, tokenizer, name="tiny", texts=TEXTS, **SMALL,
            progress=lambda what, share: said.append((what, share)),
        )  # fmt: skip
    rows = {(row["format"], row["scales"], row["centered"]): row for row in result["rows"]}
    return Run(model, tokenizer, result, rows, makers, scored, said)


def test_every_row_is_there(run):
    expected = [*ALL, ("K auto, V fp8_e4m3", DYNAMIC, False), (DEFAULT, DYNAMIC, False)]
    assert list(run.rows)[: len(expected)] == expected
    assert [fmt for fmt, _, _ in list(run.rows)[len(expected) :]] in ([], [STOCK])
    assert len(run.makers) == len(run.rows) == len(run.result["rows"])
    for row in run.result["rows"]:
        assert row["tokens"] == TEXTS * SCORED
        assert 0 < row["kl"] <= row["kl_max"]
        assert 0 < row["top1"] <= 1
        assert statistics.mean(row["kl_by_text"]) == pytest.approx(row["kl"])
        assert row["kl_error"] == pytest.approx(statistics.stdev(row["kl_by_text"]) / TEXTS**0.5)
    # Nothing is measured twice under two names, but for the default, which may be E3M4, centered.
    kls = [row["kl"] for row in run.result["rows"] if row["format"] != DEFAULT]
    assert len(set(kls)) == len(kls) == len(run.rows) - 1


@pytest.mark.parametrize(("fmt", "scales"), [*product(MEASURED, STATIC)])
def test_static_rows_use_the_scales_that_a_calibration_gives(run, fmt, scales):
    topics = pydoc_data.topics.topics
    expected = calibrate(
        run.model, [topics[name] for name in run.result["settings"]["calibrated_on"]],
        tokenizer=run.tokenizer, granularity=STATIC[scales], center=False, dtype=fmt,
        max_tokens=CALIBRATED, max_length=PREFILL + SCORED, held_out=0, progress=False,
    )  # fmt: skip
    plain = run.cache(fmt, scales, False).options
    assert plain.uniform_plan == LayerPlan.parse(fmt, fmt)
    assert plain.scales.digest == expected.digest
    assert {layer.granularity for layer in plain.scales.layers.values()} == {STATIC[scales]}
    centered = run.cache(fmt, scales, True).options
    assert centered.uniform_plan == LayerPlan.parse(fmt, fmt)
    assert plain.center_keys is centered.center_keys is None
    for index, layer in centered.scales.layers.items():
        assert layer.granularity == STATIC[scales]
        assert torch.equal(layer.v, expected.layers[index].v)
        assert not torch.equal(layer.k, expected.layers[index].k)


def test_static_centers_are_the_mean_of_the_text(run):
    topics = pydoc_data.topics.topics
    text = [topics[name] for name in run.result["settings"]["calibrated_on"]]
    ids = [run.tokenizer(t, return_tensors="pt").input_ids[0] for t in text]
    total, left, read = torch.zeros(2, 16, dtype=torch.float64), CALIBRATED, 0
    for text_ids in ids:
        for window in text_ids[:left].split(PREFILL + SCORED):
            if len(window) > 1:
                cache = DynamicCache(config=run.model.config)
                with torch.no_grad():
                    run.model(window[None], past_key_values=cache)
                total += cache.layers[1].keys[0].double().sum(1)
                left, read = left - len(window), read + len(window)
    assert read == run.result["settings"]["calibrated_tokens"]
    for fmt, scales in product(MEASURED, STATIC):
        layer = run.cache(fmt, scales, True).options.scales.layers[1]
        torch.testing.assert_close(layer.k_center, (total / read).float())


@pytest.mark.parametrize("centered", [False, True])
def test_the_row_of_the_smallest_scales(run, centered):
    """Under them the largest number is stored as the largest code, and nothing was chosen."""
    found = run.cache("fp8_e4m3", AMAX, centered).options.scales
    chosen = run.cache("fp8_e4m3", "static per head", centered).options.scales
    for index, layer in found.layers.items():
        assert layer.granularity == "head"
        for side in ("k", "v"):
            ratio = getattr(chosen.layers[index], side) / getattr(layer, side)
            assert (ratio >= 1 - 1e-5).all()
            # Among 16 in an octave, then whole octaves up.
            steps = 16 * ratio.log2()
            assert (steps - steps.round()).abs().max() < 1e-3
        assert (layer.k_center is not None) == centered


@pytest.mark.parametrize(("fmt", "centered"), [*product(MEASURED, (False, True))])
def test_other_rows_use_no_calibration(run, fmt, centered):
    for scales, given in ((CONSTANT, 1.0), (DYNAMIC, None)):
        options = run.cache(fmt, scales, centered).options
        assert [side.format for side in options.uniform_plan] == [fmt, fmt]
        assert options.scales == given
        assert options.center_keys is centered


def test_the_row_of_the_default(run):
    assert run.cache(DEFAULT, DYNAMIC, False).options == FP8PagedCache(run.model.config).options


def test_k_as_it_is(run):
    options = run.cache("K auto, V fp8_e4m3", DYNAMIC, False).options
    assert options.uniform_plan == LayerPlan.parse("auto", "fp8_e4m3")
    assert CACHES["K auto, V fp8_e4m3"] == {"dtype": "fp8_e4m3", "key_dtype": "auto"}


def test_bytes_per_token(run):
    """2 layers, K and V, 2 heads of 16; dynamic scales take four bytes for each head."""
    assert run.result["settings"]["unquantised_bytes_per_token"] == 256
    for (fmt, scales, _), row in run.rows.items():
        if fmt in MEASURED:
            assert row["bytes_per_token"] == (144 if scales == DYNAMIC else 128)
    assert run.rows["K auto, V fp8_e4m3", DYNAMIC, False]["bytes_per_token"] == 128 + 64 + 16


def test_what_is_scored_is_not_calibrated_on(run):
    settings, topics = run.result["settings"], pydoc_data.topics.topics
    assert len(set(settings["texts"])) == TEXTS == len(run.scored)
    for name, ids in zip(settings["texts"], run.scored, strict=True):
        expected = run.tokenizer(topics[name]).input_ids[: PREFILL + SCORED]
        assert ids.tolist() == [expected]

    def lines(name: str) -> set[str]:
        text = " ".join(topics[name].split())
        return {line for line in text.split(". ") if len(line) > 160}

    scored = [lines(name) for name in settings["texts"]]
    assert sum(map(len, scored)) == len(set.union(*scored)) > 20
    assert settings["calibrated_on"]
    for name in settings["calibrated_on"]:
        assert not lines(name) & set.union(*scored), name


def test_topics_that_quote_a_scored_one_are_left_out(run):
    scored, others = accuracy.split_topics(run.tokenizer, 4, 40)
    assert "customization" in scored
    assert "specialnames" not in others  # it holds all of "customization"
    assert len(others) > 40


def test_progress_is_told_to_the_end(run):
    shares = [share for _, share in run.said]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 20 < len(shares) <= 100
    assert run.said[-1][0] == f"100 %: text {TEXTS} of {TEXTS}"
    assert any("calibrating" in what for what, _ in run.said)


def test_table(run):
    console = Console(width=140, file=io.StringIO())
    console.print(accuracy.format_table(run.result))
    cells = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if "│" in line]
    assert len(cells) == len(run.rows)
    shown = ""
    for row, (fmt, scales, centered, kl, _, top1, size) in zip(
        run.rows.values(), cells, strict=True
    ):
        shown = fmt.strip() or shown  # a section shows its format once
        assert (shown, scales.strip()) == (row["format"], row["scales"])
        assert centered.strip() == ("centered" if row["centered"] else "")
        assert kl.strip() == f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}"
        assert top1.strip() == f"{row['top1']:.2%}"
        assert size.strip() == f"{row['bytes_per_token']:.0f}"


def test_more_texts_than_there_are(run):
    with pytest.raises(ConfigError, match=r"texts: expected at most \d+, got 70"):
        run_accuracy_suite(run.model, run.tokenizer, texts=70, **SMALL)


def test_on_a_command_line(folder, monkeypatch, capsys, tmp_path):
    command = command_line.runner(monkeypatch, capsys)
    suite = accuracy.run_accuracy_suite
    monkeypatch.setattr(
        accuracy, "run_accuracy_suite", lambda *given, **named: suite(*given, **named, **SMALL)
    )
    path = tmp_path / "accuracy.json"
    options = ("--suite", "accuracy", "--model", folder, "--texts", "1", "--device", "cpu")
    code, out, err = command("bench", *options, "--json", str(path))
    assert code == 0, err
    found = json.loads(path.read_text())
    assert set(found) == {
        "suite", "date", "command", "versions", "hardware", "settings", "rows"
    }  # fmt: skip
    assert found["settings"]["model"] == folder
    assert found["settings"]["dtype"] == "float32"
    assert len(found["settings"]["texts"]) == 1
    assert {row["kl_error"] for row in found["rows"]} == {None}
    assert "static per channel" in out
    assert "±" not in out.splitlines()[5]
    assert "100 %: text 1 of 1" in err


def test_the_tables_of_the_docs_are_those_of_the_run():
    docs = Path(__file__).parents[2] / "docs"
    result = json.loads((docs / "benchmarks" / "2026-11-21-accuracy.json").read_text())
    rows = {(row["format"], row["scales"], row["centered"]): row for row in result["rows"]}
    text = (docs / "accuracy.md").read_text()

    def kl(row: dict[str, Any]) -> str:
        return f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}"

    def top1(row: dict[str, Any]) -> str:
        return f"{100 * row['top1']:.1f} %"

    columns = ("fp8_e4m3", "fp8_e3m4", "fp8_e5m2")
    for scales, said in product(SCALES, (kl, top1)):
        cells = [said(rows[fmt, scales, c]) for fmt, c in product(columns, (False, True))]
        assert f"\n| {scales} | {' | '.join(cells)} |\n" in text
    amax = [said(rows["fp8_e4m3", AMAX, c]) for said in (kl, top1) for c in (False, True)]
    for cells in (amax[:2], amax[2:]):
        assert f"\n| {AMAX} | {' | '.join(cells)} | | | | |\n" in text
    for row in list(rows.values())[-2:]:
        assert f" | {kl(row)} | {top1(row)} |\n" in text
    sizes = {f"{row['bytes_per_token']:,.0f}" for row in rows.values()}
    assert sizes == {"11,520", "11,880", "17,460"}
    # Since that run K's half of a token's scales is there, too: 30 layers, 3 heads, 2 bytes more.
    assert all(size in text for size in ("11,520", "11,880", f"{17_460 + 30 * 3 * 2:,}"))
