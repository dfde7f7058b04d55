"""The load benchmark: what it makes of answers, and that both servers answer it."""

import io
import json

import pytest
from rich.console import Console
from transformers import LlamaConfig

from benchmarks.serve_clients import Answer, Server
from hf_fp8kv.bench import serve as bench_serve
from tests.helpers.serve_process import save_chat_model


@pytest.fixture
def result() -> dict:
    """What `run_serve_suite` makes of two servers that nobody started."""
    load = bench_serve.Load("some", clients=2, requests=2, words=4, new_tokens=3, blocks=8)
    servers = {}
    factors = (1.0, 2.0, 1.5)
    for name, factor in zip(bench_serve.SERVERS, factors, strict=True):
        server = servers[name] = Server(None, 0, "model")  # type: ignore[arg-type]
        times = [n / factor for n in range(1, 101)]
        server.answers = [Answer(first=at, last=3 * at, tokens=3) for at in times]
        server.throughput = [10 * factor, 12 * factor, 14 * factor]
        server.peak = 2**20
    servers[bench_serve.OURS].pages, servers[bench_serve.STOCK].failed = [5, 15, 2**21], 1
    settings = {"model": "m", "page_size": 4, "device": "cpu", "turns": 3}
    hardware = {"cpu": "a processor", "cores": 2, "instructions": ["amx_bf16"]}
    rows = bench_serve._rows(load, servers)
    return {"rows": rows, "settings": settings, "date": "today", "hardware": hardware}


def test_a_load_is_told_by_turns_and_by_percentiles(result):
    rows = {(row["measure"], row["server"]): row for row in result["rows"]}
    first = {
        share: rows[f"first token, p{share}", bench_serve.STOCK]["value"] for share in (50, 99)
    }
    assert first == {50: 50_000, 99: 99_000}
    assert rows["next token, p50", bench_serve.OURS]["value"] == 25_000
    assert rows["whole answer, p90", bench_serve.OURS]["value"] == 135
    throughput = rows["throughput", bench_serve.STOCK]
    assert (throughput["value"], throughput["low"], throughput["high"]) == (12, 11, 13)
    assert throughput["failed"] == 1
    assert rows["throughput ratio", bench_serve.OURS]["value"] == 2
    assert rows["throughput ratio", bench_serve.PLAIN]["value"] == 1.5
    assert rows["pages in use, of 15", bench_serve.OURS]["value"] == 5


def test_the_table_of_a_load_has_the_servers_side_by_side(result):
    console = Console(width=170, file=io.StringIO())
    console.print(bench_serve.format_table(result))
    lines = [line.replace(" ", "") for line in console.file.getvalue().splitlines()]
    assert "│some│throughput│tokens/s│12(11-13),1failed│24(22-26)│18(16.5-19.5)│" in lines
    assert "││bytesofallpages│MiB││2││" in lines
    assert "(amx_bf16)" in console.file.getvalue()


def test_both_servers_get_pages_of_the_same_bytes(tmp_path):
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                         hidden_size=256, dtype="bfloat16")  # fmt: skip
    config.save_pretrained(tmp_path)
    stock = bench_serve._page_bytes(str(tmp_path), 16, "auto")
    assert stock == 2 * 3 * 2 * 16 * 64 * 2
    assert bench_serve._page_bytes(str(tmp_path), 16, "fp8") == 2 * 3 * 2 * 16 * (64 + 2)
    blocks = bench_serve._same_bytes(str(tmp_path), 100, 16, "fp8")
    assert blocks == 193


@pytest.mark.full
def test_both_servers_answer_under_load(tmp_path):
    name = save_chat_model(tmp_path)
    load = bench_serve.Load(
        "some", clients=3, requests=6, words=4, new_tokens=8, blocks=64, long_words=30, streamed=40
    )
    found = bench_serve.run_serve_suite(
        model=name, device="cpu", loads=[load], page_size=16, turns=2, batch_tokens=64
    )
    rows = {(row["measure"], row["server"]): row for row in found["rows"]}
    for server in bench_serve.SERVERS:
        assert rows["throughput", server]["failed"] == 0
        assert rows["throughput", server]["value"] > 0
        assert rows["first token, p50", server]["value"] > 0
        assert rows["largest gap of a stream", server]["value"] > 0
        assert rows["first token of the long prompt", server]["value"] > 0
    sizes = [rows["bytes of all pages", s]["value"] for s in (bench_serve.STOCK, bench_serve.OURS)]
    assert sizes[1] <= sizes[0] < 1.1 * sizes[1]
    json.dumps(found)
