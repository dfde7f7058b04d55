"""Tests of the "cpu" backend: threads, compiled libraries, and calls that torch computes."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_fp8kv.errors import BackendError, OutOfPagesError
from hf_fp8kv.ops import AttentionSpec, Pages, reference
from hf_fp8kv.ops.cpu import backend as cpu_backend
from hf_fp8kv.ops.cpu import build
from tests.helpers.assertions import assert_same, assert_same_pool
from tests.helpers.codes import replace_codes
from tests.ops import test_ops

pytestmark = pytest.mark.text

NUM_HEADS = 2
HEAD_DIM = 32


def make_pages(num_tokens: int, fmt: str = "fp8_e4m3", dtype: torch.dtype = torch.float32) -> Pages:
    """Return pages of one sequence with `num_tokens` random tokens."""
    case = test_ops.Case("", lengths=(num_tokens,), k_format=fmt, v_format=fmt, dtype=dtype)
    return test_ops.fill(test_ops.make_pages(case), case)


def attend(
    pages: Pages, query: torch.Tensor, length: int, backend: Any = cpu_backend
) -> torch.Tensor:
    lengths = torch.tensor([length], dtype=torch.int32)
    spec = AttentionSpec(0.2, causal=True)
    return backend.attend(query, pages, lengths, 0, length, spec)  # type: ignore[no-any-return]


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split calls of any size between four threads."""
    monkeypatch.setattr(cpu_backend, "MIN_THREAD_VALUES", 64)
    monkeypatch.setattr(cpu_backend, "SPAN_TOKENS", 16)
    torch.set_num_threads(4)  # conftest.py resets the number before the next test


@pytest.mark.usefixtures("four_threads")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_results_do_not_depend_on_threads():
    """Bits are the same with any number of threads, with several callers, and after a fork."""
    pages = make_pages(700)
    queries = torch.randn(8, 1, 6, 3, HEAD_DIM)
    outputs = [attend(pages, query, 700) for query in queries]
    expected = attend(pages, queries[0], 700, reference)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-5, atol=1e-6)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(attend(pages, queries[0], 700), outputs[0]) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    with ThreadPoolExecutor(8) as callers:
        later_outputs = callers.map(lambda query: attend(pages, query, 700), list(queries) * 20)
    for output, expected in zip(later_outputs, outputs * 20, strict=True):
        assert_same(output, expected)
    torch.set_num_threads(1)
    assert_same(attend(pages, queries[0], 700), outputs[0])


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("case", test_ops.LATENT_CASES, ids=str)
def test_threads_share_latents(case):
    test_ops.check_attention(case, "cpu")


@pytest.mark.usefixtures("four_threads")
def test_write_and_gather_give_equal_bytes_on_many_threads():
    pages = make_pages(700)
    expected_pages = test_ops.copy_pages(pages)
    key, value = torch.randn(2, 1, NUM_HEADS, 700, HEAD_DIM)
    lengths = torch.tensor([700], dtype=torch.int32)
    cpu_backend.write(pages, key, value, lengths)
    reference.write(expected_pages, key, value, lengths)
    assert_same_pool(pages, expected_pages)
    for side in ("k", "v"):
        arguments = (lengths, side, 5, 699, torch.bfloat16, False)
        assert_same(cpu_backend.gather(pages, *arguments), reference.gather(pages, *arguments))


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("fmt", ["fp8_e3m4", "int6", "auto"])
def test_a_query_has_the_same_bits_in_any_call(fmt, window, monkeypatch):
    """Chunks, further sequences and threads do not change any bit of a result."""
    length = 1333
    num_queries = 70
    pages = make_pages(length, fmt)
    query = torch.randn(1, 6, num_queries, HEAD_DIM)
    spec = AttentionSpec(0.2, causal=True, window=window)

    def run_cpu(pages: Pages, query: torch.Tensor, *lengths: int) -> torch.Tensor:
        lengths_tensor = torch.tensor(lengths, dtype=torch.int32)
        return cpu_backend.attend(query, pages, lengths_tensor, 0, max(lengths), spec)

    separate_outputs = torch.cat([
        run_cpu(pages, query[:, :, [token]], length - num_queries + 1 + token)
        for token in range(num_queries)
    ], 1)  # fmt: skip
    two_sequences = pages._replace(table=pages.table.repeat(2, 1))
    for min_values in (1 << 30, 64):
        monkeypatch.setattr(cpu_backend, "MIN_THREAD_VALUES", min_values)
        for chunk in (1, 3, 5, num_queries):
            assert_same(run_cpu(pages, query[:, :, -chunk:], length), separate_outputs[:, -chunk:])
        output = run_cpu(two_sequences, query[:, :, -1:].repeat(2, 1, 1, 1), length, 700)
        assert_same(output[:1], separate_outputs[:, -1:])


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("fmt", ["fp8_e2m5", "fp8_e3m4", "int8", "int6", "int4"])
def test_integer_products_are_correct(fmt, rotated):
    """16-bit queries are rounded to integers. Bits do not depend on the call, and NaN stays NaN."""
    length = 1270
    num_queries = 20
    case = test_ops.Case("", lengths=(length,), k_format=fmt, v_format=fmt, dtype=torch.bfloat16,
                         k_dim=64, v_dim=64, page_size=64, rotated=rotated)  # fmt: skip
    pages = test_ops.fill(test_ops.make_pages(case), case)
    query = torch.randn(1, 6, num_queries, 64).bfloat16()
    actual = attend(pages, query, length)
    error = test_ops.compute_errors(actual, attend(pages, query.float(), length, reference))
    assert error.max() <= test_ops.bound_error(case)
    for token in range(num_queries):
        output = attend(pages, query[:, :, [token]], length - num_queries + 1 + token)
        assert_same(output, actual[:, [token]])
    if not rotated:  # NaN of V in one channel, then NaN of K, both in slot 21 of a page
        page = int(pages.table[0, 9])
        for side, index in (("v", (page, 0, 21, 5)), ("k", (page, 1, 21))):
            replace_codes(pages, side, index, test_ops.get_nan_code(fmt))
            actual = attend(pages, query[:, :, -1:], length)
            expected = attend(pages, query[:, :, -1:], length, reference)
            assert actual.isnan().any()
            assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("options", [{"lengths": (281,), "padding": 260}, {"lengths": (256, 25)}])
def test_pages_may_begin_inside_a_vector(options):
    """Weights of other tiles or sequences never multiply values of the last page."""
    case = test_ops.Case("", page_size=8, **options)
    pages, query, fields = test_ops.prepare(case)
    if not case.padding:
        test_ops.poison(pages, 0, [35])
    expected = test_ops.attend(case, pages, query, "reference", **fields)
    actual = test_ops.attend(case, pages, query, "cpu", **fields)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_more_new_tokens_than_the_length_are_refused():
    pages = make_pages(40)
    old_pages = test_ops.copy_pages(pages)
    key = torch.randn(1, NUM_HEADS, 5, HEAD_DIM)
    with pytest.raises(OutOfPagesError):
        cpu_backend.write(pages, key, key, torch.tensor([3], dtype=torch.int32))
    assert_same_pool(pages, old_pages)


def test_scales_may_have_any_layout():
    """A scale per head or per tensor may be an expanded tensor."""
    # Small scales give small logits. The error of a logit is a relative error of the result.
    k_scale = (0.01 * torch.rand(NUM_HEADS, 1)).expand(NUM_HEADS, HEAD_DIM)
    v_scale = torch.tensor(0.003).expand(NUM_HEADS, HEAD_DIM)
    pages = test_ops.replace_scales(make_pages(40), k_scale, v_scale)
    pages = pages._replace(table=pages.table.t().contiguous().t())
    query = torch.randn(1, 6, 1, HEAD_DIM)
    expected = attend(pages, query, 40, reference)
    torch.testing.assert_close(attend(pages, query, 40), expected, rtol=1e-5, atol=1e-6)


# -- libraries -------------------------------------------------------------------------------------


@pytest.fixture
def forgotten_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the loaded library, so that the next call searches for it again."""
    cpu_backend.load_library.cache_clear()
    yield
    cpu_backend.load_library.cache_clear()


@pytest.mark.usefixtures("forgotten_library")
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_each_library_matches_the_reference(capability, monkeypatch):
    """The libraries for AVX2 and AVX-512 run on any CPU with these instructions. VNNI is hidden."""
    if capability == "AVX512" and not torch.cpu._is_avx512_supported():
        pytest.skip("the CPU has no AVX-512")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    for case in test_ops.FORMAT_CASES + test_ops.SHAPE_CASES + test_ops.LATENT_CASES:
        test_ops.check_attention(case, "cpu")
    assert cpu_backend.load_library()._name == str(build.find_library(capability))


@pytest.mark.usefixtures("forgotten_library")
def test_a_missing_or_different_library_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "compute_stamp", lambda: 1)
    with pytest.raises(BackendError, match="a different source"):
        attend(make_pages(40), torch.randn(1, 6, 1, HEAD_DIM), 40)
    monkeypatch.setattr(build, "find_library", lambda _: tmp_path / "kernels_none.so")
    with pytest.raises(BackendError, match=r"kernels_none\.so.*hf_fp8kv\.ops\.cpu\.build"):
        attend(make_pages(40), torch.randn(1, 6, 1, HEAD_DIM), 40)
