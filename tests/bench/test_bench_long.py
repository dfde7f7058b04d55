"""The long suite: texts, caches filled by one call, predictions at positions, tables, charts."""

import copy
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Gemma3ForCausalLM

from benchmarks.long import caches, fill, predictions, texts
from benchmarks.long.caches import ROWS, RoundedCache, Row
from hf_fp8kv import FP8PagedCache
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.bench import long
from hf_fp8kv.calibration.divergence import UNQUANTISED, compare_caches
from hf_fp8kv.errors import ConfigError
from tests.helpers import command_line
from tests.helpers.tiny_models import causal_config

pytestmark = pytest.mark.text

POSITIONS, SCORED, TEXTS = (48, 130), 16, 2
KINDS = ("prose", "chat")
MEASURED = ("default", "e4m3", "int8", "bf16", "q8_0", "stock-fp8")
SMALL = {
    "positions": POSITIONS, "scored": SCORED, "kinds": KINDS, "tasks": (), "caches": MEASURED
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def said() -> list[tuple[str, float]]:
    return []


@pytest.fixture(scope="module")
def result(model, tokenizer, said):
    return long.run_long_suite(
        model, tokenizer, name="tiny", texts=TEXTS, **SMALL,
        progress=lambda what, share: said.append((what, share)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def windowed():
    """A model with two layers of each kind: a window of 8 tokens, and all."""
    config = causal_config("gemma3_text", sliding_window=8)
    return Gemma3ForCausalLM(config).float().eval()


# -- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", texts.KINDS)
def test_texts_are_what_was_asked_for_and_do_not_repeat(tokenizer, kind):
    read = texts.read_texts(tokenizer, kind, 3, 300)
    assert [tuple(ids.shape) for ids in read] == [(1, 300)] * 3
    assert all(ids.dtype == torch.int64 for ids in read)
    again = texts.read_texts(tokenizer, kind, 2, 300)
    assert torch.equal(torch.cat(read[:2]), torch.cat(again))
    first, second = ("".join(map(str, ids[0].tolist())) for ids in read[:2])
    assert first != second


def test_kinds_are_what_they_are_called():
    code, prose, manual, tools, chat = (
        next(pieces()) for pieces in (texts.KINDS[kind] for kind in texts.KINDS)
    )
    compile(code, "code", "exec")
    assert len(prose) >= 200
    assert "\n\n" not in prose.strip()
    assert "Special method names" in manual
    described = json.loads(tools)["function"]
    assert set(described) == {"name", "description", "parameters"}
    assert isinstance(chat, tuple)
    assert "(" in chat[0]


def test_arguments_of_tools_have_the_types_of_their_defaults():
    described = (json.loads(piece)["function"] for piece in texts.KINDS["tool JSON"]())
    dump = next(function for function in described if function["name"] == "ast.dump")
    assert dump["parameters"]["required"] == ["node"]
    kinds = {name: kind["type"] for name, kind in dump["parameters"]["properties"].items()}
    assert kinds["annotate_fields"] == "boolean"
    assert "self" not in kinds


def test_a_chat_is_in_the_template_of_the_model(tokenizer):
    plain = tokenizer.decode(texts.read_texts(tokenizer, "chat", 1, 60)[0][0])
    template = "{% for m in messages %}London {{ m['content'] }}{% endfor %}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", template)
        chat = tokenizer.decode(texts.read_texts(tokenizer, "chat", 1, 60)[0][0])
    assert "London" in chat
    assert "London" not in plain


def test_more_texts_than_there_are(tokenizer):
    with pytest.raises(
        ConfigError, match=r"expected at most \d+ of 20000 tokens of the kind 'manual'"
    ):
        texts.read_texts(tokenizer, "manual", 99, 20_000)


# -- caches that are filled ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e3m4", "e4m3", "e4m3-1.0", "int8", "q8_0", "stock-fp8"])
@pytest.mark.parametrize("length", [63, 64, 65, 130])
def test_a_filled_cache_is_the_one_that_the_model_fills(model, name, length):
    """What the prefix holds behind `length` does not matter."""
    ids = torch.arange(1, 161)[None] % 30
    row = ROWS[name]
    with paged_attention(model), torch.no_grad():
        given = fill.Prefix(model, ids[:, :140]).fill(row, length)
        called = row.make(model.config)
        model(input_ids=ids[:, :length], past_key_values=called)
        logits = [
            model(input_ids=ids[:, length : length + 9], past_key_values=cache).logits
            for cache in (given, called)
        ]
    assert given.get_seq_length() == called.get_seq_length() == length + 9
    # Keys and values of a longer call may differ in the last bit, and then a code by a step.
    torch.testing.assert_close(*logits, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["e4m3", "q8_0"])
def test_layers_with_a_window_are_given_what_has_left_it(windowed, name):
    ids = torch.arange(3, 63)[None]
    with paged_attention(windowed), torch.no_grad():
        given = fill.Prefix(windowed, ids[:, :40]).fill(ROWS[name], 20)
        called = ROWS[name].make(windowed.config)
        windowed(input_ids=ids[:, :20], past_key_values=called)
        logits = [
            windowed(input_ids=ids[:, 20:25], past_key_values=cache).logits
            for cache in (given, called)
        ]
    torch.testing.assert_close(*logits, rtol=0, atol=2e-3)


def test_a_cache_that_asks_is_called_by_the_model(model):
    """It sees queries; the others never run the model."""
    lengths: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    ids = torch.arange(1, 31)[None]
    with paged_attention(model):
        prefix = fill.Prefix(model, ids)
        prefix.fill(ROWS["e3m4"], 20)
        prefix.fill(ROWS["default"], 21)
    handle.remove()
    assert lengths == [30, 21]


# -- rivals --------------------------------------------------------------------------------------


def test_q8_0_rounds_blocks_of_32_to_their_largest_number():
    states = torch.randn(1, 2, 5, 80)  # the last block has 16
    states[..., 40] *= 50
    rounded = caches.round_to_q8_0(states)
    for block, exact in zip(rounded.split(32, -1), states.split(32, -1), strict=True):
        step = exact.abs().amax(-1, keepdim=True) / 127
        # half a step, and float16's error of the scale
        assert ((block - exact).abs() <= 0.5 * step + 127 * step * 2**-11).all()
        assert (block - exact).abs().max() > 0.3 * step.min()
    assert torch.equal(caches.round_to_q8_0(torch.zeros(1, 1, 2, 64)), torch.zeros(1, 1, 2, 64))


def test_rounded_caches_store_what_the_rounding_keeps(model):
    k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    cache = RoundedCache(model.config, caches.round_to_bfloat16)
    cache.update(k, v, 0)
    assert torch.equal(cache.layers[0].keys, k.bfloat16().float())
    assert torch.equal(cache.layers[0].values, v.bfloat16().float())


def test_rivals_that_are_not_there_are_named(model, windowed, monkeypatch):
    monkeypatch.setattr(caches, "_is_installed", lambda module: False)
    rows, missing = caches.choose_rows(model, ["int8", "quanto-int4", "hqq-int8"])
    assert list(rows) == ["int8"]
    assert missing == {
        "quanto-int4": "not installed: pip install optimum-quanto",
        "hqq-int8": "not installed: pip install hqq",
    }
    rows, missing = caches.choose_rows(windowed, ["stock-fp8"])
    assert not rows
    assert "full attention" in missing["stock-fp8"]
    with pytest.raises(ConfigError, match=r"caches: expected some of default, .* got 'fp4'"):
        caches.choose_rows(model, ["fp4"])


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.needs])
def test_rivals_of_packages(model, name):
    rows, _ = caches.choose_rows(model, [name])
    if not rows:
        pytest.skip(f"{ROWS[name].needs} is not installed")
    ids = torch.arange(1, 161)[None] % 30
    with paged_attention(model):
        scores = predictions.score_text(model, ids, rows, positions=[140], scored=20)
    assert 0 < scores[140, name].quality.kl < 1


# -- predictions ---------------------------------------------------------------------------------


def test_scores_are_those_of_the_quality_suite_before_a_position(model):
    ids = torch.arange(1, 131)[None] % 30
    rows = {name: ROWS[name] for name in ("e4m3", "q8_0")}
    with paged_attention(model):
        found = predictions.score_text(model, ids, rows, positions=[60, 130], scored=10)
        for position in (60, 130):
            expected = compare_caches(
                model, ids[:, :position],
                {name: lambda row=row: row.make(model.config) for name, row in rows.items()},
                prefill=position - 10, chunk=10,
            )  # fmt: skip
            for name in (UNQUANTISED, *rows):
                ours, theirs = found[position, name].quality, expected[name].quality
                assert ours.tokens == theirs.tokens == 10
                assert ours.kl == pytest.approx(theirs.kl, rel=0.02, abs=1e-9)
                assert ours.perplexity == pytest.approx(theirs.perplexity, rel=1e-3)


def test_a_cache_that_loses_a_token_is_seen(model):
    """The yardstick of the others: a whole cache gives 0, one token less does not."""

    class Forgetful(DynamicCache):
        def update(self, k, v, index, *args, **kwargs):
            first = index >= len(self.layers) or not self.layers[index].get_seq_length()
            k, v = (torch.cat([x[:, :, :1] * 0, x[:, :, 1:]], 2) if first else x for x in (k, v))
            return super().update(k, v, index, *args, **kwargs)

    rows = {
        "whole": Row("whole", lambda config: DynamicCache(config=config)),
        "forgetful": Row("forgetful", lambda config: Forgetful()),
    }
    ids = torch.arange(1, 61)[None] % 30
    with paged_attention(model):
        scores = predictions.score_text(model, ids, rows, positions=[60], scored=10)
    assert scores[60, "whole"].quality.kl == 0
    assert scores[60, "forgetful"].quality.kl > 1e-4


def test_rows_of_the_result(result):
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {
        "suite", "date", "command", "versions", "hardware", "settings", "complete", "caches",
        "predictions", "tasks",
    }  # fmt: skip
    assert result["complete"] is True
    assert [row["cache"] for row in result["caches"]] == list(MEASURED)
    assert {row["missing"] for row in result["caches"]} == {None}
    layers = {row["cache"]: sum(row["plans"].values()) for row in result["caches"]}
    stored = 2 * TEXTS * len(KINDS) * len(POSITIONS)
    assert layers == {name: 0 if name in ("bf16", "q8_0", "stock-fp8") else stored
                      for name in MEASURED}  # fmt: skip
    rotated = {row["cache"]: row["k_rotated"] for row in result["caches"]}
    assert rotated["default"] + rotated["int8"] > 0
    assert rotated["e4m3"] == 0
    found = {(r["cache"], r["position"], r["kind"]): r for r in result["predictions"]}
    kinds = ("all", *KINDS)
    assert set(found) == {(c, p, k) for c in MEASURED for p in POSITIONS for k in kinds}
    for (cache, position, kind), row in found.items():
        texts_of_row = TEXTS * (len(KINDS) if kind == "all" else 1)
        assert row["tokens"] == texts_of_row * SCORED
        assert len(row["kl_by_text"]) == len(row["top1_by_text"]) == texts_of_row
        for name in ("kl", "top1"):
            by_text = row[f"{name}_by_text"]
            assert statistics.mean(by_text) == pytest.approx(row[name])
            error = statistics.stdev(by_text) / texts_of_row**0.5
            assert row[f"{name}_error"] == pytest.approx(error)
        if kind == "all":
            parts = [found[cache, position, kind]["kl_by_text"] for kind in KINDS]
            assert row["kl_by_text"] == [kl for part in parts for kl in part]
    kl = {cache: found[cache, POSITIONS[-1], "all"]["kl"] for cache in MEASURED}
    assert 0 < kl["bf16"] < kl["default"] < kl["e4m3"]


def test_bits_of_a_number(result, model):
    bits = {row["cache"]: row["bits"] for row in result["caches"]}
    assert bits == {
        "default": 9.0, "e4m3": 9.0, "int8": 9.0, "bf16": 16, "q8_0": 8.5, "stock-fp8": 8
    }  # fmt: skip
    cache = FP8PagedCache(model.config)
    states = torch.ones(1, 2, 64, 16, dtype=torch.bfloat16)
    cache.update(states, states, 0)
    assert bits["default"] == 8 * cache.memory_footprint()["used"] / (2 * states.numel())


def test_progress_is_told_to_the_end(result, said):
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert said[-1][0].startswith("100 %: chat, text 2 of 2")


def test_tables(result):
    console = Console(width=200, file=io.StringIO())
    console.print(long.format_table(result))
    shown = console.file.getvalue()
    found = {(r["cache"], r["position"], r["kind"]): r for r in result["predictions"]}
    for cache in result["caches"]:
        assert cache["title"] in shown
        if layers := sum(cache["plans"].values()):
            assert f"{cache['k_rotated']} of {layers}" in shown
        row = found[cache["cache"], POSITIONS[0], "all"]
        assert f"{row['top1']:.1%}" in shown
    row = found["e4m3", POSITIONS[-1], "prose"]
    digits = 3 if 1e3 * row["kl"] < 1 else 2
    assert f"{1e3 * row['kl']:.{digits}f} ± {1e3 * row['kl_error']:.{digits}f}" in shown


@pytest.mark.parametrize("positions", [(SCORED, 100), (100, 257), ()])
def test_positions_out_of_reach(model, tokenizer, positions):
    with pytest.raises(ConfigError, match=r"positions: expected some above 16.* up to 256"):
        long.run_long_suite(model, tokenizer, **{**SMALL, "positions": positions})


def test_unknown_kinds(model, tokenizer):
    with pytest.raises(ConfigError, match=r"kinds: expected some of code, .* got 'verse'"):
        long.run_long_suite(model, tokenizer, **{**SMALL, "kinds": ["verse"]})


def test_unknown_tasks(model, tokenizer):
    with pytest.raises(ConfigError, match=r"tasks: expected some of single needle, .* got 'sums'"):
        long.run_long_suite(model, tokenizer, **{**SMALL, "tasks": ["sums"]})


def test_what_is_cut_short_is_kept(model, tokenizer, tmp_path):
    """The file has the first text of each kind and part of the second ones, and says so."""
    path = tmp_path / "long.json"

    def interrupt(what: str, share: float) -> None:
        if "chat, text 2 of 2" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        long.run_long_suite(
            model, tokenizer, name="tiny", texts=2, **{**SMALL, "caches": ["e4m3"]},
            save=path, progress=interrupt,
        )  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["long.json"]
    found = json.loads(path.read_text())
    assert found["complete"] is False
    tokens = {(row["position"], row["kind"]): row["tokens"] for row in found["predictions"]}
    last = POSITIONS[-1]
    assert tokens[last, "prose"] == 2 * SCORED
    assert tokens[last, "chat"] == SCORED
    assert tokens[last, "all"] == 3 * SCORED
    console = Console(width=200, file=io.StringIO())
    console.print(long.format_table(found))
    assert "3 texts, 16 tokens each" in console.file.getvalue()
    assert "INCOMPLETE" in console.file.getvalue()


def test_chart(result, tmp_path, monkeypatch):
    """Of all results of a model one panel, and its points with their errors, by position."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    further = copy.deepcopy(result)
    for row in further["predictions"]:
        row["position"] += 1000
    other = {**result, "settings": {**result["settings"], "model": "other $1"}}
    long.plot([further, result, other], tmp_path / "kl.png")
    assert (tmp_path / "kl.png").read_bytes()[1:4] == b"PNG"
    tiny, same = figures[0].axes
    assert [axes.get_title(loc="left") for axes in (tiny, same)] == ["tiny", "other $1"]
    assert len(tiny.containers) == len(same.containers) == len(MEASURED)
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    place = legend.index("fp8_e4m3")
    rows = [
        row
        for row in (*result["predictions"], *further["predictions"])
        if (row["cache"], row["kind"]) == ("e4m3", "all")
    ]
    line, _, (bars,) = tiny.containers[place]
    assert line.get_xdata().tolist() == [row["position"] for row in rows]
    assert line.get_ydata().tolist() == [1e3 * row["kl"] for row in rows]
    for row, (low, high) in zip(rows, bars.get_segments(), strict=True):
        assert high[1] - low[1] == pytest.approx(2e3 * row["kl_error"])


def test_a_chart_of_files(result, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    command = command_line.runner(monkeypatch, capsys)
    files = [tmp_path / "one.json", tmp_path / "other.json"]
    for file in files:
        file.write_text(json.dumps(result))
    picture = tmp_path / "kl.png"
    named = [part for file in files for part in ("--from", str(file))]
    code, out, err = command("bench", "--suite", "long", *named, "--plot", str(picture))
    assert code == 0, err
    assert out.count(f"KL at {POSITIONS[-1]}") == 2
    assert picture.stat().st_size > 1000
    code, _, err = command("bench", "--suite", "long", *named, "--json", "-")
    assert code == 2
    assert "expected one file, got 2" in err
    files[0].write_text(json.dumps({**result, "suite": "gpu"}))
    code, _, err = command("bench", "--suite", "long", "--from", str(files[0]))
    assert code == 2
    assert "expected what --suite long wrote" in err


def test_nothing_to_draw(result, tmp_path):
    with pytest.raises(ConfigError, match="plot: expected scores of texts, got none"):
        long.plot([{**result, "predictions": []}], tmp_path / "kl.png")


def test_on_a_command_line(folder, monkeypatch, capsys, tmp_path):
    command = command_line.runner(monkeypatch, capsys)
    path = tmp_path / "long.json"
    options = (
        "--suite", "long", "--model", folder, "--device", "cpu", "--texts", "1",
        "--positions", "100,200", "--kinds", "tool JSON", "--tasks", "none",
        "--caches", "int8, hqq-int4", "--scored", "32", "--outliers", "50", "--outlier-heads", "2",
    )  # fmt: skip
    monkeypatch.setattr(caches, "_is_installed", lambda module: False)
    code, out, err = command("bench", *options, "--json", str(path))
    assert code == 0, err
    found = json.loads(path.read_text())
    assert found["settings"]["positions"] == [100, 200]
    assert found["settings"]["scored"] == 32
    assert (found["settings"]["outliers"], found["settings"]["outlier_heads"]) == (50, 2)
    assert "outliers x50 in K of 1 in 2 heads" in " ".join(out.split())
    assert found["settings"]["texts"] == ["tool JSON"]
    assert found["settings"]["tasks"] == found["tasks"] == []
    assert {row["kl_error"] for row in found["predictions"]} == {None}
    assert "not installed: pip install hqq" in out
    assert "KL at 200" in out
    code, _, err = command("bench", "--suite", "long", "--positions", "1k")
    assert code == 2
    assert "expected numbers of tokens" in err


def test_the_tables_of_the_docs_are_those_of_the_runs():
    docs = Path(__file__).parents[2] / "docs"
    names = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b")
    files = [docs / "benchmarks" / f"2026-11-23-long-{name}.json" for name in names]
    results = [json.loads(path.read_text()) for path in files]
    titles = {row["cache"]: row["title"] for result in results for row in result["caches"]}
    text = (docs / "accuracy.md").read_text()
    for cache, title in titles.items():
        kl, top1 = [], []
        for result in results:
            rows = {r["position"]: r for r in result["predictions"]
                    if (r["cache"], r["kind"]) == (cache, "all")}  # fmt: skip
            for position in result["settings"]["positions"]:
                row = rows.get(position)
                kl.append(
                    f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}" if row else "refused"
                )
                top1.append(f"{100 * row['top1']:.1f} %" if row else "refused")
        assert f"\n| {title} | {' | '.join(kl)} |\n" in text
        assert f"\n| {title} | {' | '.join(top1)} |\n" in text


def test_the_table_of_outliers_is_that_of_the_runs():
    docs = Path(__file__).parents[2] / "docs"
    files = [docs / "benchmarks" / f"2026-11-23-outliers-{every}.json" for every in (1, 2)]
    results = [json.loads(path.read_text()) for path in files]
    assert [result["settings"]["outlier_heads"] for result in results] == [1, 2]
    text = (docs / "accuracy.md").read_text()
    for number, cache in enumerate(results[0]["caches"]):
        cells = []
        for result in results:
            (row,) = (r for r in result["predictions"]
                      if (r["cache"], r["kind"]) == (cache["cache"], "all"))  # fmt: skip
            plans = result["caches"][number]
            cells.append(f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}")
            cells.append(f"{plans['k_rotated']} of {sum(plans['plans'].values())}")
        assert f"\n| {cache['title']} | {' | '.join(cells)} |\n" in text


def test_the_table_of_tasks_is_that_of_the_run():
    docs = Path(__file__).parents[2] / "docs"
    result = json.loads((docs / "benchmarks" / "2026-11-23-tasks-smollm2-135m.json").read_text())
    text = (docs / "accuracy.md").read_text()
    tasks = sorted(result["tasks"], key=lambda task: task["position"])
    right = [str(round(task["ceiling"] * task["asked"])) for task in tasks]
    assert f"\n| unquantised | {' | '.join(right)} |\n" in text
    for cache in result["caches"]:
        cells, lost = [], 0
        for task in tasks:
            (found,) = (a for a in task["answers"] if a["cache"] == cache["cache"])
            cells.append(f"{found['right']} ({found['lost']})".removesuffix(" (0)"))
            lost += found["lost"]
        assert f"\n| {cache['title']} | {' | '.join(cells)} |\n" in text
        assert lost == {"default": 0, "bf16": 0, "q8_0": 1, "e4m3": 4}[cache["cache"]]
    assert f"of {sum(map(int, right))} answers" in text


def test_what_is_lost_on_the_second_model_is_that_of_the_run():
    docs = Path(__file__).parents[2] / "docs"
    result = json.loads((docs / "benchmarks" / "2026-11-23-tasks-gemma3-270m.json").read_text())
    right = sum(round(task["ceiling"] * task["asked"]) for task in result["tasks"])
    lost = dict.fromkeys(("default", "bf16", "q8_0", "e4m3"), 0)
    for task in result["tasks"]:
        for answer in task["answers"]:
            lost[answer["cache"]] += answer["lost"]
            assert task["task"] == "variables" or not answer["lost"]
    names = dict(zip(lost, ("the default loses", "bfloat16", "q8_0", "E4M3"), strict=True))
    *said, last = [f"{names[cache]} {count}" for cache, count in lost.items()]
    expected = f"{right} answers that the unquantised cache has right {', '.join(said)} and {last}"
    text = " ".join((docs / "accuracy.md").read_text().split())
    assert expected in text
