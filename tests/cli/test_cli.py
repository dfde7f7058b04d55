"""The command line in this process: its output and its exit codes."""

import json
import re
from pathlib import Path

import pytest
import torch

from hf_fp8kv.cli import values
from hf_fp8kv.cli.side_by_side import Run, compare_tokens
from hf_fp8kv.utils.environment import version
from tests.helpers import command_line
from tests.scales.test_export import random_scales

pytestmark = pytest.mark.text

TEMPLATE = "{% for m in messages %}the {{ m['content'] }} of{% endfor %}"


@pytest.fixture
def ask(run, model):
    """Return a function that runs `generate --json` with the tiny model."""

    def _ask(*arguments: str, stdin: str = "", model: str = model) -> dict:
        fixed = ("--model", model, "--json", "--max-new-tokens", "12", "--backend", "torch")
        code, out, err = run("generate", *arguments, *fixed, stdin=stdin)
        assert code == 0, err
        return json.loads(out)

    return _ask


# -- generate --------------------------------------------------------------------------------------


def test_auto_gives_the_tokens_and_the_bytes_of_the_usual_cache(ask, tmp_path):
    # float32, because two attentions that round to 16 bits may choose different tokens.
    folder = command_line.save_tiny_model(tmp_path, torch.float32)
    found = ask("--kv-cache-dtype", "auto", model=folder)
    dense, pages = found["runs"]
    assert pages["token_ids"] == dense["token_ids"]
    assert found["agreement"] == {"equal": 12, "of": 12, "first_difference": None}
    assert pages["bytes_per_token"] == dense["bytes_per_token"]
    assert dense["cached_tokens"] == pages["cached_tokens"] == 5 + 12 - 1
    # 2 layers, K and V, 2 heads of 16, 4 bytes each
    assert dense["cache_bytes"] == dense["cached_tokens"] * 2 * 2 * 2 * 16 * 4
    assert (dense["attention"], pages["attention"]) == ("sdpa", "fp8_paged")


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        (["--scales", "1.0"], 1 / 2),
        ([], 1 / 2 + 1 / 16),  # a bf16 scale for each head's 16 numbers
        (["--kv-cache-dtype", "fp8_e4m3fn", "--page-size", "16"], 1 / 2 + 1 / 16),
        (["--key-dtype", "auto", "--scales", "1.0"], 3 / 4),
        (["--kv-cache-dtype", "int8", "--value-dtype", "fp8_e2m5", "--scales", "1.0"], 1 / 2),
        (["--kv-cache-dtype", "fp8_e3m4", "--center-keys", "--scales", "1.0"], 1 / 2),
    ],
    ids=["constant", "dynamic", "alias-small-pages", "keys-kept", "two-formats", "centered"],
)
def test_eight_bits_take_their_share(ask, options, ratio):
    dense, pages = ask(*options)["runs"]
    assert pages["bytes_per_token"] / dense["bytes_per_token"] == pytest.approx(ratio)
    assert pages["scales"] == ("1.0" if "--scales" in options else "dynamic")
    fit = 8 * 1024**3
    assert dense["tokens_that_fit"] == fit // dense["bytes_per_token"]
    assert pages["tokens_that_fit"] == fit // pages["bytes_per_token"]


@pytest.mark.parametrize("attn", ["sdpa", "eager", "fp8_paged"])
def test_every_attention_reads_the_pages(ask, attn):
    found = ask("--attn", attn, "--kv-cache-dtype", "auto")
    assert found["runs"][1]["attention"] == attn
    assert len(found["runs"][1]["token_ids"]) == 12


def test_a_prompt_comes_from_stdin(ask):
    assert ask("-", stdin="the capital\n")["prompt"] == "the capital"


def test_sampling_repeats_with_its_seed(ask):
    seeds = ("1", "1", "2")
    runs = [ask("--temperature", "5", "--seed", seed)["runs"][0]["token_ids"] for seed in seeds]
    assert runs[0] == runs[1] != runs[2]


def test_chat_uses_the_template(ask, run, model, tmp_path):
    code, _, err = run("generate", "--model", model, "--chat")
    assert code == 1
    assert "expected a chat template" in err
    (path := Path(model) / "chat_template.jinja").write_text(TEMPLATE)
    try:
        assert ask("capital", "--chat")["runs"][0]["cached_tokens"] == 3 + 12 - 1
    finally:
        path.unlink()


@pytest.mark.parametrize("columns", ["30", pytest.param("80", marks=pytest.mark.full), "200"])
def test_the_table_fits_the_terminal(run, model, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    fixed = ("--model", model, "--backend", "torch", "--max-new-tokens", "9")
    code, out, _ = run("generate", "the capital", *fixed, "--memory", "500 MB")
    assert code == 0
    assert max(map(len, out.splitlines())) <= int(columns)
    if columns == "200":
        pages = "pages of 64, K fp8_e3m4 centered, V fp8_e3m4"
        for part in ("DynamicCache bfloat16", pages, "of 9", "fit into 500 MB"):
            assert part in out


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (3, 3, None)),
        ([1, 2, 3], [1, 9, 3], (2, 3, 1)),
        ([1, 2], [1, 2, 3], (2, 3, 2)),
        ([1], [2], (0, 1, 0)),
    ],
    ids=["equal", "one-differs", "one-is-longer", "nothing"],
)
def test_agreement_counts_places(one, other, expected):
    def answer(ids: list[int]) -> Run:
        return Run("", "", "", "", ids, None, 1, 1, 1.0, 1)

    found = compare_tokens(answer(one), answer(other))
    assert tuple(found.values()) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30), ("16 GB", 16 * 10**9), ("512m", 512 * 10**6), ("1.5KiB", 1536),
        ("1000000", 10**6), ("2TiB", 2**41), ("7b", 7),
    ],
)  # fmt: skip
def test_sizes_are_read(text, size):
    assert values.parse_memory(text) == size


# -- errors ----------------------------------------------------------------------------------------


# HERE is a folder with scales, OUT a folder that does not exist.
INSPECT, CONVERT = "inspect HERE ", "convert HERE "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate --kv-cache-dtype int4", "--kv-cache-dtype"),
        ("generate --key-dtype fp16", "--key-dtype"),
        ("generate --memory much", "--memory"),
        ("generate --memory -1GB", "--memory"),
        ("generate --max-new-tokens 0", "--max-new-tokens"),
        ("generate --temperature -1", "--temperature"),
        ("generate --no-such-option", "--no-such-option"),
        (INSPECT + "--model x", "--texts"),
        (INSPECT + "--dtype fp8_e5m2", "--texts"),
        (INSPECT + "--max-tokens 9", "--max-tokens"),
        (INSPECT + "--texts x --dtype int4", "fp8_e5m2, fp8_e3m4, fp8_e2m5, int8"),
        (INSPECT + "--texts x --dtype auto", "--dtype"),
        (INSPECT + "--plot /no/such/folder/x.png", "expected a file in a folder that exists"),
        (INSPECT + "--plot scales.pdf", ".png"),
        (CONVERT + "OUT", "--to"),
        (CONVERT + "OUT --to gguf", "vllm-json, tgi, compressed-tensors, autofp8"),
        (CONVERT + "--to tgi", "--push-to-hub"),
        (CONVERT + "OUT --to tgi --push-to-hub org/name", "--push-to-hub"),
        (CONVERT + "OUT/kv_cache_scales.json --to vllm-json", "expected a folder"),
        (CONVERT + "OUT --to tgi --weights move", "copy, link"),
        (CONVERT + "OUT --to tgi --weights link", "--checkpoint"),
        (CONVERT + "--push-to-hub org/name --to tgi --checkpoint x", "--checkpoint"),
        (CONVERT + "OUT --to vllm-json --tp-size 0", "--tp-size"),
    ],
)
def test_a_wrong_command_line_exits_with_2(run, tmp_path, line, message):
    random_scales("tensor").save_pretrained(tmp_path / "own")
    places = {"HERE": str(tmp_path / "own"), "OUT": str(tmp_path / "out")}
    given = [re.sub("HERE|OUT", lambda m: places[m[0]], part) for part in line.split()]
    code, out, err = run(*given)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("inspect /no/such/folder", "/no/such/folder"),
        (INSPECT + "--texts /no/such/file.txt", "/no/such/file.txt"),
        ("convert /no/such/folder OUT --to tgi", "/no/such/folder"),
        ("convert /no/such/file.json OUT --to tgi", "/no/such/file.json"),
        ("convert scales.pt OUT --to tgi", "scales.pt"),
    ],
)
def test_a_missing_file_is_named(run, tmp_path, line, named):
    random_scales("tensor").save_pretrained(tmp_path / "own")
    places = {"HERE": str(tmp_path / "own"), "OUT": str(tmp_path / "out")}
    code, out, err = run(*[places.get(part, part) for part in line.split()])
    assert (code, out) == (1, "")
    assert err.startswith("hf-fp8kv: error: ")
    assert named in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scales", "0"], "scale"),
        (["--scales", "nan"], "scale"),
        (["--scales", "/no/such/file.json"], "/no/such/file.json"),
        (["--backend", "abacus"], "abacus"),
        (["--page-size", "48"], "page_size"),
        (["--attn", "no_such_attention"], "no_such_attention"),
        (["--device", "no_such_device"], "no_such_device"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        ([""], "at least one token"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_of_ours_is_one_message_and_exits_with_1(run, model, arguments, message):
    chosen = arguments if "--model" in arguments else [*arguments, "--model", model]
    code, out, err = run("generate", *chosen)
    assert code == 1
    assert not out
    last = err[err.index("hf-fp8kv: error: ") :]
    assert message in last
    assert "Traceback" not in err


# -- the other commands ----------------------------------------------------------------------------


def test_help_names_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    for name in ("generate", "calibrate", "inspect", "convert", "check", "bench"):
        assert name in out


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.strip() == version("hf-fp8kv")


def test_check_shows_versions_and_backends(run):
    code, out, _ = run("check", "--json")
    found = json.loads(out)
    assert code == 0
    # A build for GPUs has its CUDA in `torch.__version__` alone.
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["backends"]["torch"] == "available"
    assert run("check")[0] == 0


def test_check_reports_on_a_model(run, model):
    code, out, _ = run("check", "--json", "--model", model)
    assert code == 0
    assert "fused" in json.dumps(json.loads(out)["model"])
    assert "fused" in run("check", "--model", model)[1]
