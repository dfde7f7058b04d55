"""Tests of the GPU benchmark in dry runs: tiny shapes on any device, and meaningless times.

A contender with a wrong result must not get a time.
"""

import functools
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import attention, baselines, cached, end_to_end, latent, suite, write
from benchmarks.gpu.record import Record
from benchmarks.gpu.shapes import E4M3, PAGE_FORMATS, TINY, Case
from benchmarks.gpu.stage import Stage
from hf_fp8kv import ops

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
DRY_RUN = {"device": "cpu", "backend": "torch", "is_dry": True}
# Names of contenders.
LATENT_STEPS = {"e3m4", "e4m3", "bf16 pages"}
LATENT_KERNELS = {f"{name} kernel" for name in LATENT_STEPS}


@pytest.fixture
def record() -> Record:
    return Record(Stage("cpu", is_dry=True))


def find_failures(record, measure, *args):
    """Measure a section, assert that failed contenders have no time, and return their names."""
    with torch.no_grad():
        measure(record, *args)
    assert record.rows
    assert all(("failed" in row) != ("us" in row) for row in record.rows), record.rows
    return {row["name"] for row in record.rows if "failed" in row}


def test_every_section_has_correct_rows(monkeypatch):
    # Only the first two caches run end to end, because compiling takes minutes.
    monkeypatch.setattr(end_to_end, "CONTENDERS", end_to_end.CONTENDERS[:2])
    monkeypatch.setattr(end_to_end, "OTHER_CONTENDERS", [])
    monkeypatch.setattr(suite, "TINY", replace(TINY, write_batches=(1,)))
    result = suite.run_suite(**DRY_RUN)
    assert not [row for row in result["rows"] if "failed" in row]
    # No kernels of other projects are installed.
    assert {row["section"] for row in result["rows"]} == {*suite.SECTIONS} - {"other kernels"}
    for row in result["rows"]:
        if row["section"] in ("decode", "layer", "extend"):
            assert 0 <= row["error"] < 0.01, row


# Each of these functions returns the given function with a defect.


def scale_output(function):
    def call_and_scale(*args, **kwargs):
        output = function(*args, **kwargs)
        return (output[0] * 1.05, *output[1:]) if isinstance(output, tuple) else output * 1.05

    return call_and_scale


def make_one_value_nan(function):
    def call_and_change(*args, **kwargs):
        output = function(*args, **kwargs)
        output[-1, -1, 0, 0] = torch.nan
        return output

    return call_and_change


def drop_last_tokens(function):
    def attend_to_fewer_tokens(query, pages, lengths, *args, **kwargs):
        return function(query, pages, (lengths - 8).clamp(min=1), *args, **kwargs)

    return attend_to_fewer_tokens


def deny(function):
    return lambda *args: False


def drop_mask(function):
    return lambda module, query, key, value, _mask: function(module, query, key, value, None)


def flip_bit(function):
    def write_and_flip(pages, *args, **kwargs):
        function(pages, *args, **kwargs)
        pages.regions["v"].view(torch.uint8)[-1, -1, -1, -1] ^= 1

    return write_and_flip


# Measurements: a function, and its arguments after the record.
LATENT_RUN = (latent.measure, TINY, "torch")
PADDED_CASE = Case((130, 130), TINY.heads, padding=(0, 65))
CACHED_RUN = (cached.measure_attention, "decode", PADDED_CASE, E4M3, "torch")
RAGGED_CASE = Case((1, 33, 130), TINY.heads, label="ragged")
RAGGED_RUN = (attention.measure_pages, TINY, "torch", "decode", RAGGED_CASE, E4M3)
WRITE_RUN = (write.measure, replace(TINY, write_batches=(1,), written_tokens=70), "torch")
SDPA_RUN = (functools.partial(baselines.measure_decode, with_gqa=True), TINY.decode_cases[0])
# A module, its function, a defect for it, the measurement, and the contenders that must fail.
DEFECTS = [
    (ops, "attend", scale_output, LATENT_RUN, LATENT_STEPS | LATENT_KERNELS),
    (ops, "attend", drop_last_tokens, RAGGED_RUN, {"e4m3"}),
    (ops, "attend", make_one_value_nan, RAGGED_RUN, {"e4m3"}),
    (ops, "write", flip_bit, WRITE_RUN, {fmt.name for fmt in PAGE_FORMATS}),
    (cached, "fp8_paged_attention", drop_mask, CACHED_RUN, {"e4m3"}),
    (latent, "fp8_paged_attention", scale_output, LATENT_RUN, LATENT_STEPS),
    (latent, "sdpa_attention_forward", scale_output, LATENT_RUN, {latent.STOCK}),
    # Attention to expanded latents is correct, but the row is for stored latents.
    (latent.latent, "reads_stored_latents", deny, LATENT_RUN, LATENT_STEPS),
    (baselines, "attend_grouped", scale_output, SDPA_RUN, {"sdpa math"}),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "add_defect", "measure", "failed_names"), DEFECTS)
def test_a_wrong_contender_fails_without_a_time(
    record, monkeypatch, module, name, add_defect, measure, failed_names
):
    function = getattr(module, name)
    monkeypatch.setattr(module, name, functools.wraps(function)(add_defect(function)))
    assert find_failures(record, *measure) == failed_names
