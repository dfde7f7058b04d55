"""The suite on latents: what it measures shows what is known to go wrong."""

import io
import json

import pytest
from rich.console import Console

from hf_fp8kv.bench import latent_accuracy


@pytest.fixture(scope="module")
def result():
    return latent_accuracy.run_latent_suite(texts=1, prefill=64, score=32, layers=2, rank=128)


def test_every_model_and_cache_is_measured(result):
    assert json.loads(json.dumps(result)) == result
    names = {latent_accuracy.DEFAULT, *latent_accuracy.IMITATED}
    for kind in latent_accuracy.KINDS:
        rows = {row["cache"]: row for row in result["rows"] if row["model"] == kind}
        assert names < set(rows)
        assert len(rows) == len(names) + len(latent_accuracy.PLANS)
        assert all(row["kl"] > 0 for row in rows.values())


def test_the_default_is_nearer_than_a_scale_per_128_numbers_in_fewer_bytes(result):
    for kind in latent_accuracy.KINDS:
        rows = {row["cache"]: row for row in result["rows"] if row["model"] == kind}
        default = rows[latent_accuracy.DEFAULT]
        others = rows["fp8_ds_mla (e4m3, scale per 128)"]
        assert default["bytes_per_token"] < others["bytes_per_token"] == 656
        assert 2 * default["kl"] < others["kl"]


def test_a_scale_of_the_latent_alone_saturates_large_positions(result):
    rows = {row["cache"]: row for row in result["rows"] if row["model"] == "large positions"}
    saturated = rows["e4m3, the latent's scale for both"]["kl"]
    # With 8 bits each, but a scale of their own, they do not.
    assert saturated > 10 * rows["latents fp8_e3m4, positions fp8_e4m3"]["kl"]


def test_the_table(result):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(latent_accuracy.format_table(result))
    text = console.export_text()
    for name in (latent_accuracy.DEFAULT, *latent_accuracy.IMITATED, *latent_accuracy.KINDS):
        assert name in text
