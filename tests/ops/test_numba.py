"""What only the "numba" backend has: threads, a cache on disk, and cases that it hands over."""

import os
import platform
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

numba = pytest.importorskip("numba", reason="numba is not installed: pip install 'hf-fp8kv[cpu]'")

# After the line above, which skips this file where numba is missing.
from numba.core import event  # noqa: E402

from hf_fp8kv import ops  # noqa: E402
from hf_fp8kv.ops import AttentionSpec, Pages, reference  # noqa: E402
from hf_fp8kv.ops.numba import backend as numba_backend  # noqa: E402
from hf_fp8kv.ops.numba import lanes  # noqa: E402
from tests.helpers.assertions import assert_same, assert_same_pool  # noqa: E402
from tests.helpers.counting import BytesWritten  # noqa: E402
from tests.ops import test_ops  # noqa: E402
from tests.ops.test_ops import with_scales  # noqa: E402

pytestmark = pytest.mark.text

HEADS, DIM = 2, 32


def make(tokens: int, fmt: str = "fp8_e4m3", dtype: torch.dtype = torch.float32) -> Pages:
    """Pages of one sequence with `tokens` random tokens."""
    case = test_ops.Case("", lengths=(tokens,), key=fmt, value=fmt, dtype=dtype)
    return test_ops.fill(test_ops.poisoned(case), case)


def attend(
    pages: Pages, query: torch.Tensor, tokens: int, module: Any = numba_backend
) -> torch.Tensor:
    lengths = torch.tensor([tokens], dtype=torch.int32)
    found = module.attend(query, pages, lengths, 0, tokens, AttentionSpec(0.2, causal=True))
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call is split, however small."""
    monkeypatch.setattr(numba_backend, "GRAIN", 64)
    monkeypatch.setattr(numba_backend, "SPLIT", 16)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads")
def test_threads_give_one_result():
    pages, query = make(700), torch.randn(1, 6, 3, DIM)
    expected = attend(pages, query, 700, reference)
    first = attend(pages, query, 700)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    for _ in range(20):
        assert_same(attend(pages, query, 700), first)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("case", test_ops.LATENTS, ids=str)
def test_threads_share_latents(case):
    pages, query, kwargs = test_ops.prepare(case)
    expected = test_ops.attend(case, pages, query.float(), "reference", **kwargs)
    found = test_ops.attend(case, pages, query, "numba", **kwargs)
    assert test_ops.errors(found, expected).max() <= test_ops.bound(case)


@pytest.mark.usefixtures("many_threads")
def test_write_and_gather_on_many_threads():
    pages = make(700)
    other = test_ops.copy(pages)
    key, value = torch.randn(2, 1, HEADS, 700, DIM)
    ends = torch.tensor([700], dtype=torch.int32)
    numba_backend.write(pages, key, value, ends)
    reference.write(other, key, value, ends)
    assert_same_pool(pages, other)
    for side in ("k", "v"):
        arguments = (ends, side, 5, 699, torch.bfloat16, False)
        assert_same(numba_backend.gather(pages, *arguments), reference.gather(pages, *arguments))


@pytest.mark.usefixtures("many_threads")
def test_threads_that_never_start_cost_nothing(monkeypatch):
    """As after a fork, where the pool's threads are gone: the caller does all of the work."""
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *_: Future())
    pages, query = make(700), torch.randn(1, 6, 1, DIM)
    expected = attend(pages, query, 700, reference)
    torch.testing.assert_close(attend(pages, query, 700), expected, rtol=1e-5, atol=1e-6)


def test_one_thread_is_respected(monkeypatch):
    monkeypatch.setattr(numba_backend, "GRAIN", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *_: pytest.fail("a thread is used"))
    attend(make(700), torch.randn(1, 6, 1, DIM), 700)


@pytest.mark.usefixtures("many_threads")
def test_an_error_on_another_thread_is_raised():
    calls = []

    def kernel() -> None:
        calls.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError
        while len(calls) < 2:
            pass

    with pytest.raises(ZeroDivisionError):
        numba_backend._run(kernel, 2)


@pytest.mark.usefixtures("many_threads")
def test_calls_from_several_threads_at_once():
    pages, queries = make(700), torch.randn(8, 1, 6, 1, DIM)
    expected = [attend(pages, query, 700) for query in queries]
    with ThreadPoolExecutor(8) as callers:
        found = callers.map(lambda i: attend(pages, queries[i % 8], 700), range(160))
    for i, result in enumerate(found):
        assert_same(result, expected[i % 8])


def test_scales_of_any_layout():
    """A scale per head or per tensor may come expanded."""
    # Small, so that logits are: an error of a logit is a relative one of the result.
    scale = (0.01 * torch.rand(HEADS, 1)).expand(HEADS, DIM)
    pages = with_scales(make(40), scale, torch.tensor(0.003).expand(HEADS, DIM))
    pages = pages._replace(table=pages.table.t().contiguous().t())
    query = torch.randn(1, 6, 1, DIM)
    expected = attend(pages, query, 40, reference)
    torch.testing.assert_close(attend(pages, query, 40), expected, rtol=1e-5, atol=1e-6)


def test_no_folder_for_the_cache(monkeypatch):
    compiled = []

    def njit(**options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: compiled.append(function) or function

    monkeypatch.setattr(numba, "njit", njit)
    lanes.kernel(len)
    assert compiled == [len]


def run_script(script: str, **environment: str) -> str:
    """Run a script in another process, and return what it writes."""
    root = Path(__file__).parents[2]
    folders = os.pathsep.join([str(root), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": folders, **environment}, check=True,
    )  # fmt: skip
    return run.stdout.strip().split("\n")[-1]


@pytest.mark.full
def test_a_second_process_compiles_nothing(tmp_path):
    """One signature per kernel whatever the formats, dtypes and shapes; found on disk again."""
    script = """
        import json, torch
        from numba.core import event
        from hf_fp8kv.ops import prepare_backend
        from hf_fp8kv.ops.numba import attend as attention, backend, gather, write
        from tests.ops.test_numba import attend, make

        kernels = (attention.attend, attention.finish, write.write, write.has_pages, gather.gather)
        with event.install_recorder("numba:compile") as compiled:
            prepare_backend("numba")
            prepared = [len(k.signatures) for k in kernels]
            for fmt, dtype in (("fp8_e4m3", torch.float32), ("auto", torch.bfloat16)):
                pages = make(40, fmt, dtype)
                for heads, tokens in ((2, 1), (6, 5)):
                    attend(pages, torch.randn(1, heads, tokens, 32).to(dtype), 40)
                lengths = torch.tensor([39], dtype=torch.int32)
                backend.write(pages, *torch.randn(2, 1, 2, 1, 32).to(dtype), lengths)
                backend.gather(pages, lengths, "v", 0, 39, dtype, True)
        print(json.dumps([len(compiled.buffer), prepared, [len(k.signatures) for k in kernels]]))
    """
    results = [run_script(script, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert results[0] != results[1]
    assert results[1] == "[0, [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]"


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have other features")
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        # Fewer registers: fewer sums at once.
        ({"NUMBA_CPU_FEATURES": "-avx512f"}, "4 True"),
        # What numba leaves out would otherwise end the process.
        ({"NUMBA_CPU_NAME": "generic"}, "4 False"),
    ],
)
def test_settings_of_numba(setting, expected, tmp_path):
    script = """
        from hf_fp8kv.ops.numba import latent, memory
        from tests.ops import test_ops

        for case in test_ops.LATENTS:
            pages, query, kwargs = test_ops.prepare(case)
            want = test_ops.attend(case, pages, query.float(), "reference", **kwargs)
            found = test_ops.attend(case, pages, query, "numba", **kwargs)
            assert test_ops.errors(found, want).max() <= test_ops.bound(case), case
        print(latent.WIDE, memory.HAS_HALF)
    """
    assert run_script(script, NUMBA_CACHE_DIR=str(tmp_path), **setting) == expected


def test_a_changed_file_has_another_stamp(tmp_path, monkeypatch):
    (tmp_path / "cpu_a.py").write_text("1")
    monkeypatch.setattr(lanes, "__file__", str(tmp_path / "lanes.py"))
    first = lanes._stamp()
    (tmp_path / "cpu_a.py").write_text("2")
    assert lanes._stamp() not in (0, first)


def test_a_call_compiles_and_copies_nothing():
    assert ops.choose_backend("auto", torch.device("cpu")) == "numba"
    pages, query = make(4000), torch.randn(1, 6, 1, DIM)
    attend(pages, query, 4000)
    with event.install_recorder("numba:compile") as compiled, BytesWritten() as written:
        attend(pages, query, 4000)
    assert not compiled.buffer
    assert written.total < pages.k_codes.nbytes / 10
