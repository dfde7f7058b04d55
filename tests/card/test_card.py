"""Tests of `hf-fp8kv card`: the values, the texts, and a card that resumes."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv import KVScales
from hf_fp8kv.calibration.divergence import Scores
from hf_fp8kv.card import measure
from hf_fp8kv.card.caches import choose_contenders, round_to_q8_0
from hf_fp8kv.card.measure import Size
from hf_fp8kv.card.rendering import make_columns
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats.rotation import rotate
from tests.helpers import command_line
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text
SIZE = Size(positions=(96, 128), num_scored=16, step_positions=(64,))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"), positions=1024)


@pytest.fixture
def run_command(monkeypatch, capsys):
    monkeypatch.setitem(measure.SIZES, "quick", SIZE)
    return command_line.make_runner(monkeypatch, capsys)


def test_a_card_has_the_values_of_its_caches(run_command, model_folder, tmp_path):
    options = ("card", model_folder, "--quick", "--device", "cpu", "--caches", "default,fp8,bf16")
    code, output, stderr = run_command(*options, "--out", str(tmp_path))
    assert code == 0, stderr
    card = json.loads((tmp_path / "card.json").read_text())
    assert {"commit", "idle", "hardware", "versions", "date", "command"} <= card.keys()
    caches = card["caches"]
    mean_kl = {name: cache["verdict"]["kl"] for name, cache in caches.items()}
    assert 0 < mean_kl["bf16"] < mean_kl["default"] < mean_kl["fp8"]
    # 2 layers with K and V of 2 heads. A head has 16 codes and a 16-bit scale, or 16-bit values.
    page_bytes = 2 * 2 * 2 * (16 + 2)
    stock_bytes = 2 * 2 * 2 * 16 * 2
    assert {name: cache["bytes_per_token"] for name, cache in caches.items()} == {
        "default": page_bytes, "fp8": page_bytes, "bf16": stock_bytes
    }  # fmt: skip
    assert caches["fp8"]["tokens"] == 8 * 2**30 // page_bytes
    assert caches["bf16"]["steps"] == {"64": None}, "expected no times of an imitated cache"
    markdown = (tmp_path / "card.md").read_text()
    assert re.search(r"\| KL at 96, stored( \| [\d.]+ ± [\d.]+){3} \|", markdown)
    assert re.search(r"\| total variation at \d+( \| [\d.]+%){3} \|", markdown)
    for cache in caches.values():
        for row in cache["predictions"]:
            assert 0 < row["total_variation"] <= (row["kl"] / 2) ** 0.5  # Pinsker's inequality
        assert f"* {cache['title']}: {cache['verdict']['tier']}" in markdown
        assert f"{cache['title']}: {cache['verdict']['tier']}" in " ".join(output.split())


def test_an_interrupted_card_resumes(run_command, model_folder, monkeypatch, tmp_path):
    monkeypatch.setitem(measure.SIZES, "quick", replace(SIZE, positions=(96,), step_positions=()))
    options = ("card", model_folder, "--quick", "--device", "cpu", "--caches", "fp8", "--out")
    # The third text is interrupted.
    score = mock.Mock(
        wraps=measure.score_text,
        side_effect=[mock.DEFAULT, mock.DEFAULT, KeyboardInterrupt, *[mock.DEFAULT] * 9],
    )
    monkeypatch.setattr(measure, "score_text", score)
    folders = [tmp_path / "resumed", tmp_path / "whole"]
    assert run_command(*options, str(folders[0]))[0] == 130
    assert [path.name for path in folders[0].iterdir()] == ["quick.parts.json"]
    assert run_command(*options, str(folders[0]))[0] == 0
    assert score.call_count == 6, "finished parts must not be repeated"
    assert run_command(*options, str(folders[1]))[0] == 0
    resumed, whole = (
        json.loads((folder / "card.json").read_text())["caches"]["fp8"] for folder in folders
    )
    assert resumed == whole


def test_own_texts_replace_the_texts_of_python(run_command, model_folder, tmp_path):
    # Short texts are joined. Tokens that do not reach the last position are left out.
    path = tmp_path / "texts.jsonl"
    text_lines = [json.dumps(f"{'word ' * 60}{index}") for index in range(5)]
    path.write_text("\n".join(text_lines))
    options = (
        "card", model_folder, "--quick", "--device", "cpu", "--caches", "fp8", "--texts", str(path),
        "--memory", "4GiB", "--json", "--out", str(tmp_path / "card"),
    )  # fmt: skip
    code, output, stderr = run_command(*options)
    assert code == 0, stderr
    card = json.loads(output)
    cache = card["caches"]["fp8"]
    assert card["settings"]["num_texts"] == 2
    assert cache["tokens"] == 4 * 2**30 // cache["bytes_per_token"]
    assert {row["kind"] for row in cache["predictions"]} == {"all", "own texts"}
    markdown = (tmp_path / "card" / "card.md").read_text()
    assert markdown.startswith(f"# {Path(model_folder).name}: losses")
    assert "in each of 2 texts" in markdown
    path.write_text(text_lines[0])
    code, _, stderr = run_command(*options)
    assert code == 1
    assert "texts: expected at least 128 tokens, got 61" in stderr


def test_each_result_depends_on_the_texts_the_scales_and_the_weights(
    model_folder, monkeypatch, tmp_path
):
    # A later run keeps no result of others. Each text begins as the tokenizer begins it.
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, bos_token="<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $0", None, [("<s>", 0)])
    score = mock.Mock(wraps=measure.score_text)
    monkeypatch.setattr(measure, "score_text", score)
    scales_folder = str(tmp_path / "scales")
    losses = []
    for word, scale, factor in (("of", 0.1, 1), ("is", 0.1, 1), ("is", 0.3, 1), ("is", 0.3, 1.5)):
        KVScales.uniform(2, scale).save_pretrained(scales_folder, overwrite=True)
        model.model.embed_tokens.weight.data *= factor
        card = measure.measure_card(
            model, tokenizer, name="tiny", parts_path=tmp_path / "parts.json", size=SIZE,
            texts=[f"London {word} the capital " * 20] * 4, caches=["fp8"], scales=scales_folder,
        )  # fmt: skip
        losses.append(card["caches"]["scales"]["verdict"]["kl"])
    assert len(set(losses)) == len(losses)
    scored_texts = [call.args[1][0].tolist() for call in score.call_args_list]
    assert {(ids[0], ids.count(0), len(ids)) for ids in scored_texts} == {(0, 1, 128)}
    model.lm_head.weight.data[0] = torch.nan
    with pytest.raises(ConfigError, match="model: expected logits other than NaN"):
        measure.measure_card(
            model, tokenizer, name="tiny", parts_path=tmp_path / "parts.json", size=SIZE
        )


def test_statistics_of_texts():
    scores = [
        Scores(kl, (kl > 50).double(), torch.full((99,), 2.0), kl / 2)
        for kl in torch.arange(200.0).double().view(2, 100)
    ]
    assert measure.summarize_scores(scores) == {
        "kl": 99.5, "kl_error": pytest.approx(50.0), "kl_p99": pytest.approx(197.01), "kl_max": 199,
        "top1": 0.745, "total_variation": 49.75, "perplexity": pytest.approx(math.e**2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--quick", "--long"), 2, "expected --quick or --long, got both"),
        (("--caches", "default,fp9"), 1, "caches: expected some of default, fp8_e3m4"),
        (("--caches", "defualt"), 1, "got 'defualt'. Did you mean 'default'?"),
        (("--scales", "/no/such/folder"), 1, "/no/such/folder"),
    ],
)
def test_invalid_options_are_refused(run_command, model_folder, options, code, message, tmp_path):
    exit_code, output, stderr = run_command(
        "card", model_folder, *options, "--out", str(tmp_path / "card")
    )
    assert (exit_code, output) == (code, "")
    assert message in " ".join(stderr.replace("│", " ").split())
    assert not (tmp_path / "card").exists()


@pytest.mark.parametrize("name", ["jamba", "seq2seq/t5"])
def test_unsupported_models_are_refused(name, model_folder, tmp_path):
    model, _ = build_variant(name, max_position_embeddings=512)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with pytest.raises(ConfigError, match="model: expected a decoder of attention layers"):
        measure.measure_card(model, tokenizer, name=name, parts_path=tmp_path / "x" / "parts.json")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("head_size", "rotation_size", "group_size", "max_code"),
    [(80, None, 0, 127), (128, None, 128, 31), (192, 64, 64, 127)],
)  # With head size 80, the last block has 16 values. K is rotated over 128 values, V over 64.
def test_q8_0_rounds_blocks_of_32_by_their_largest_value(
    head_size, rotation_size, group_size, max_code
):
    states = torch.randn(1, 2, 5, head_size)
    states[..., 40] *= 50
    rounded, expected = (
        rotate(values.unflatten(-1, (-1, group_size))).flatten(-2) if group_size else values
        for values in (round_to_q8_0(states, rotation_size, max_code), states)
    )
    for block, exact in zip(rounded.split(32, -1), expected.split(32, -1), strict=True):
        step = exact.abs().amax(-1, keepdim=True) / max_code
        # The bound is half a step plus the error of a scale in float16.
        assert ((block - exact).abs() <= 0.501 * step + max_code * step * 2**-11).all()
        assert (block - exact).abs().max() > 0.3 * step.min()


def find_formats(contender, model) -> set[str]:
    return {side.format for layer in contender.make(model).plan.values() for side in layer}


def test_caches_are_selected_by_name_or_plan(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    contenders, refusals = choose_contenders(model)
    assert list(contenders) == ["default", "fp8_e3m4", "fp8", "QuantizedCache", "bf16"]
    assert not refusals
    contenders, refusals = choose_contenders(model, ["checkpoint", "int8 rotated"])
    assert str(contenders["int8 rotated"].make(model).plan[0].v) == "int8 rotated"
    assert "checkpoint" in refusals
    contenders, _ = choose_contenders(model, ["6-bit", "fp8_e3m4 + int4 rotated"])
    assert find_formats(contenders["6-bit"], model) == {"int6"}
    assert find_formats(contenders["fp8_e3m4 + int4 rotated"], model) == {"fp8_e3m4", "int4"}
    with pytest.raises(ConfigError, match="caches: expected a usable cache"):
        choose_contenders(model, ["checkpoint"])


# Caches by their titles in docs/accuracy.md.
CACHES_BY_TITLE = {
    'the default with a model: a plan, `dtype="adaptive"`': "default",
    'the default with only a config: `dtype="fp8_e3m4"`': "fp8_e3m4",
    '`dtype="fp8"`: E4M3, a scale per token and head': "fp8",
    "the plan of six bits: `bits=6`": "6-bit",
    "E4M3 with scale 1.0, as in servers without scales": "fp8-1.0",
    "q8_0 of llama.cpp": "q8_0",
    'transformers\' `QuantizedCache("fp8")`': "QuantizedCache",
    "K and V rounded to bfloat16": "bf16",
}


def test_the_docs_contain_the_values_of_the_cards():
    root = Path(__file__).parents[2]
    cards_folder = root / "docs" / "benchmarks" / "cards"
    page_lines = (root / "docs" / "accuracy.md").read_text().splitlines()
    header = next(line for line in page_lines if line.startswith("| model | cache |"))
    models = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b")
    kl_cells: dict[tuple[str, str], str] = {}
    for name in models:
        card = json.loads((cards_folder / f"{name}.json").read_text())
        measures, *columns = make_columns(card).values()
        for cache, column in zip(card["caches"], columns, strict=True):
            values = dict(zip(measures, column, strict=True))
            kl_cells[cache, name] = values["KL at 2,048"].split(" ")[0]
            cells = [values[title] for title in header.strip("| ").split(" | ")[2:]]
            assert f"| {name} | {cache} | {' | '.join(cells)} |" in page_lines
    for title, cache in CACHES_BY_TITLE.items():
        cells = " | ".join(kl_cells.get((cache, name), "refused") for name in models)
        pattern = rf"\| {re.escape(title)} \| .*\| {re.escape(cells)} \|"
        assert any(re.fullmatch(pattern, line) for line in page_lines)
    ratios = [float(kl_cells["fp8", name]) / float(kl_cells["default", name]) for name in models]
    claim = f"{min(ratios):.0f} to {max(ratios):.0f} times less than usual FP8"
    assert claim in (root / "README.md").read_text()
