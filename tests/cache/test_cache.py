"""`FP8PagedCache`: contents after every operation, sizes, budgets and refused arguments."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_fp8kv import (
    BackendError,
    ConfigError,
    FP8KVError,
    FP8PagedCache,
    KVScales,
    LayerScales,
    OutOfPagesError,
    ScaleError,
)
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from hf_fp8kv.utils import warn_once
from tests.helpers.assertions import assert_same
from tests.helpers.counting import BytesWritten
from tests.helpers.tiny_models import causal_config, tiny

pytestmark = pytest.mark.text

LAYERS, HEADS, DIM = 2, 2, 16


def config(name: str = "llama", **fields: Any) -> Any:
    return causal_config(name, **fields)


def tokens(count: int, batch: int = 2, seed: int = 0, dim: int = DIM) -> torch.Tensor:
    """Return `[batch, HEADS, count, dim]` of values that every 8-bit float format holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (batch, HEADS, count, dim), generator=generator) / 2


def feed(cache: FP8PagedCache, count: int, seed: int = 0, batch: int = 2) -> torch.Tensor:
    """Write tokens to every layer: K of layer i is larger by i / 2 than K of layer 0, V is -K."""
    k = tokens(count, batch, seed)
    for layer in range(LAYERS):
        cache.update(k + layer / 2, -k - layer / 2, layer)
    return k


def content(cache: FP8PagedCache) -> torch.Tensor:
    """Return K of layer 0, after checking that the other layer and V agree with it."""
    stored = slice(0, cache.host_length())
    keys = [layer.keys.dense()[:, :, stored] for layer in cache.layers]
    for i, layer in enumerate(cache.layers):
        assert_same(keys[i], keys[0] + i / 2)
        assert_same(layer.values.dense()[:, :, stored], -keys[i])
    return keys[0]


# A constant scale of 1 and values that the format holds: reads return the written values.
EXACT = {"scales": 1.0, "page_size": 8}


# Grid: The format decides the codes, and the count decides where a page ends.
@pytest.mark.parametrize(
    ("dtype", "count"), [*((x, 9) for x in ("auto", *FORMATS)), *((None, x) for x in (1, 7, 8, 63))]
)
def test_written_tokens_are_read(dtype: str | None, count: int) -> None:
    cache = FP8PagedCache(config(), dtype=dtype, **EXACT)
    parts = [feed(cache, count), feed(cache, 1, 1), feed(cache, 9, 2)]
    expected = torch.cat(parts, 2)
    # All values are multiples of 1/2.
    rounded = {"fp8_e5m2": expected.to(torch.float8_e5m2).float(), "int8": expected.round()}
    if dtype in rounded:
        assert_same(cache.layers[0].keys.dense(), rounded[dtype])
    else:
        assert_same(content(cache), expected)
    assert cache.get_seq_length() == count + 10


@pytest.mark.parametrize(("dtype", "room"), [(torch.bfloat16, None), (torch.float16, 40)], ids=str)
def test_auto_stores_sixteen_bits_unchanged(dtype: torch.dtype, room: int | None) -> None:
    k = torch.randn(2, HEADS, 21, DIM).to(dtype)
    cache = FP8PagedCache(config(), dtype="auto", page_size=8, max_cache_len=room)
    for part in k.split(7, 2):
        cache.update(part, -part, 1)
    for stored, expected in ((cache.layers[1].keys, k), (cache.layers[1].values, -k)):
        assert_same(stored.dense()[:, :, :21], expected)


@pytest.mark.parametrize("room", [None, 40])
def test_centers_follow_their_sequences(room: int | None) -> None:
    cache = FP8PagedCache(config(), max_cache_len=room)
    k = torch.randn(2, HEADS, 21, DIM) + torch.tensor([40.0, -40.0])[:, None, None, None]
    cache.update(k, k, 0)
    read = cache.layers[0].keys.dense()[:, :, :21].clone()
    assert (read - k)[..., -1].abs().max() < 0.1  # a channel that RoPE turns slowly
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_same(cache.layers[0].keys.dense()[:, :, :21], read[[1, 0]])


@pytest.mark.parametrize("preallocated", [False, True])
def test_operations_on_sequences(preallocated: bool) -> None:
    cache = FP8PagedCache(config(), max_cache_len=40 if preallocated else None, **EXACT)
    k = feed(cache, 11)

    cache.reorder_cache(torch.tensor([1, 1]))
    assert_same(content(cache), k[[1, 1]])
    extra = feed(cache, 3, 1)
    assert_same(content(cache), torch.cat([k[[1, 1]], extra], 2), "equal rows diverge")
    cache.batch_repeat_interleave(2)
    expected = torch.cat([k[[1, 1]], extra], 2).repeat_interleave(2, 0)
    assert_same(content(cache), expected)
    last = feed(cache, 2, 2, batch=4)
    expected = torch.cat([expected, last], 2)
    assert_same(content(cache), expected)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert_same(content(cache), expected[[3, 0]])
    cache.crop(-5)
    assert_same(content(cache), expected[[3, 0]][:, :, :-5])
    again = feed(cache, 6, 3)
    assert_same(content(cache), torch.cat([expected[[3, 0]][:, :, :-5], again], 2))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same(feed(cache, 4, 5), content(cache))


def test_layers_may_have_different_lengths() -> None:
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 10)
    for _ in range(3):
        cache.update(tokens(1), -tokens(1), 0)
    assert [layer.get_seq_length() for layer in cache.layers] == [13, 10]
    cache.layers[0].crop(-3)
    assert_same(content(cache), k)


def test_forks_share_and_diverge() -> None:
    # 2 sequences of 3 pages, and for each of 5 forks a copy of the last page of each sequence.
    cache = FP8PagedCache(config(), max_pages=6 + 5 * 2, **EXACT)
    k = feed(cache, 20)
    forks = [cache.fork() for _ in range(6)]
    for i, fork in enumerate(forks[:5]):
        feed(fork, 1, 10 + i)
    for count, pages in ((1, 2), (1, 2), (5, 4)):  # copied pages, and new ones
        with pytest.raises(OutOfPagesError, match="max_pages") as caught:
            feed(forks[5], count)
        assert (caught.value.needed, caught.value.available) == (pages, 0)
    for i, fork in enumerate(forks[:5]):
        assert_same(content(fork), torch.cat([k, tokens(1, seed=10 + i)], 2))
    for unchanged in (forks[5], cache):
        assert_same(content(unchanged), k)
    # Dropped forks free their pages at once, and the last holder of a page writes in place.
    del forks, fork, unchanged, caught
    extra = feed(cache, 44, 1)
    fork = cache.fork()
    del cache
    assert_same(content(fork), torch.cat([k, extra], 2))
    fork.reset()
    assert fork.memory_footprint().total_bytes < 1000, "no cache holds a page"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_copies_of_a_preallocated_cache_allocate_as_few_pages(name: str, tmp_path: Path) -> None:
    cache = FP8PagedCache(config(name), max_cache_len=20, **EXACT)
    k = feed(cache, 11)
    footprint = cache.memory_footprint()
    twins = [cache.fork(), pickle.loads(pickle.dumps(cache)),
             FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))]  # fmt: skip
    for twin in twins:
        assert twin.memory_footprint() == footprint
        for i, layer in enumerate(twin.layers):
            # A ring holds only the window.
            assert layer.keys.start == (11 - 8 + 1 if layer.is_sliding else 0)
            keys = layer.keys.dense()[:, :, : 11 - layer.keys.start]
            assert_same(keys, k[:, :, layer.keys.start :] + i / 2, f"layer {i}")


def test_copies_have_the_attributes_of_a_subclass() -> None:
    class Named(FP8PagedCache):
        def __init__(self, name: str) -> None:
            super().__init__(config())
            self.name = name

    cache = Named("first")
    feed(cache, 5)
    for twin in (cache.fork(), copy.copy(cache), copy.deepcopy(cache)):
        assert type(twin) is Named
        twin.name += ", copied"
        assert twin.name == "first, copied"
    assert cache.name == "first"


def test_forks_and_beams_of_16k_tokens_copy_no_tokens() -> None:
    cache, stock = FP8PagedCache(config()), DynamicCache(config=config())
    for layer in range(LAYERS):
        big = torch.randn(4, HEADS, 16384, 64)
        cache.update(big, big, layer)
        stock.update(big, big, layer)
    index = torch.tensor([2, 0, 0, 3])
    before = cache.memory_footprint()
    bytes_written = []
    for call in (
        lambda: stock.reorder_cache(index),
        lambda: cache.fork(),
        lambda: cache.reorder_cache(index),
    ):
        with BytesWritten() as written:
            call()
        bytes_written.append(written.total)
    assert bytes_written[0] >= sum(2 * layer.keys.nbytes for layer in stock.layers)
    # A fork or a reorder copies the indices of pages of 64 tokens.
    assert max(bytes_written[1:]) <= 100 * 4 * 16384 // 64
    after = cache.memory_footprint()
    assert after.pages_bytes <= before.pages_bytes
    assert after.used_bytes == before.used_bytes * 3 // 4, (
        "the pages of the dropped sequence are free"
    )


@pytest.mark.parametrize(("keywords", "share"), [({}, 0.54), ({"scales": 1.0}, 0.52)])
@pytest.mark.parametrize("dim", [64, 128])
def test_half_of_the_memory_at_8k(keywords: dict[str, Any], share: float, dim: int) -> None:
    cache = FP8PagedCache(config(head_dim=dim), **keywords)
    for layer in range(LAYERS):
        big = torch.randn(1, HEADS, 8192, dim, dtype=torch.bfloat16)
        cache.update(big, big, layer)
        for _ in range(3):
            cache.update(big[:, :, :1], big[:, :, :1], layer)
    footprint = cache.memory_footprint()
    bf16 = 8195 * LAYERS * HEADS * dim * 2 * 2
    assert footprint.total_bytes <= share * bf16, footprint
    assert footprint.used_bytes <= footprint.pages_bytes + footprint.scales_bytes
    assert footprint.tokens == 8195


# -- scales and centers --------------------------------------------------------------------------


def scales_per_head() -> KVScales:
    k = torch.tensor([[0.01], [0.04]])
    v = torch.tensor([[0.5], [0.002]])
    return KVScales({i: LayerScales(k * (i + 1), v * (i + 1)) for i in range(LAYERS)})


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_static_scales_are_converted_to_the_format(dtype: str) -> None:
    scales = scales_per_head()
    cache = FP8PagedCache(config(), dtype=dtype, scales=scales, page_size=8)
    fmt = FORMATS[dtype]
    # Values up to 448 times the scale of each head, the range that a scale for E4M3FN covers.
    unit = tokens(9).sign() * torch.linspace(0.3, 1.0, 9)[:, None]
    for i in range(LAYERS):
        layer = scales.layers[i]
        cache.update(unit * 447 * layer.k[:, None], unit * 447 * layer.v[:, None], i)
    # The smallest value is 0.3 of the largest.
    relative = max(2.0 ** -(fmt.mantissa_bits + 1), fmt.min_subnormal / 2 / (0.299 * fmt.max))
    for i, layer in enumerate(cache.layers):
        for side, handle in (("k", layer.keys), ("v", layer.values)):
            expected = unit * 447 * getattr(scales.layers[i], side)[:, None]
            error = ((handle.dense() - expected).abs() / expected.abs().clamp(min=1e-6)).amax()
            assert error <= relative * 1.01, (side, error)


def test_centers_of_scales_remove_a_common_bias() -> None:
    bias = 50 * torch.randn(1, HEADS, 1, DIM)
    scales = KVScales(
        {
            i: LayerScales(torch.tensor(0.01), torch.tensor(0.01), bias[0, :, 0])
            for i in range(LAYERS)
        }
    )
    # Static scales saturate far below the bias. A key equal to the center is stored as 0.
    cache = FP8PagedCache(config(), scales=scales)
    cache.update(bias.repeat(2, 1, 3, 1), tokens(3), 0)
    assert_same(cache.layers[0].keys.dense(), bias.repeat(2, 1, 3, 1))


def test_nan_stays_nan() -> None:
    for keywords in (
        {},
        {"scales": 1.0},
        {"dtype": "fp8_e3m4"},
        *({"dtype": name, "scales": 1.0} for name in ("fp8_e3m4", "fp8_e2m5", "int8")),
        {"dtype": "int8"},
    ):
        cache = FP8PagedCache(config(), **keywords)
        k = tokens(3)
        k[0, 0, 1, 3] = torch.nan
        cache.update(k, k, 0)
        for handle in (cache.layers[0].keys, cache.layers[0].values):
            dense = handle.dense()
            assert dense[0, 0, 1, 3].isnan()
            assert not dense[0, 0, [0, 2]].isnan().any()
            assert not dense[1].isnan().any()


def test_an_unused_declared_scale_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    declared = config()
    declared.quantization_config = {
        "quant_method": "compressed-tensors", "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
    }  # fmt: skip
    warn_once._WARNED.clear()
    for _ in range(2):
        FP8PagedCache(declared)
    assert sum("declares static KV scales" in r.message for r in caplog.records) == 1
    FP8PagedCache(declared, scales=scales_per_head())
    assert len(caplog.records) == 1


# -- skip_layers, offload, other layers -------------------------------------------------


def test_skip_layers() -> None:
    mixed = config("gemma3_text")
    kinds = mixed.layer_types
    by_type = FP8PagedCache(mixed, skip_layers=["sliding_attention"])
    for kind, layer in zip(kinds, by_type.layers, strict=True):
        assert (type(layer).__name__ == "FP8PagedLayer") == (kind != "sliding_attention")
    by_index = FP8PagedCache(mixed, skip_layers=(0, -1))
    stock = [type(layer).__name__ != "FP8PagedLayer" for layer in by_index.layers]
    assert stock == [True, *[False] * (len(kinds) - 2), True]


# -- refused calls change nothing -----------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dtype": "int4"}, "dtype: expected one of"),
        ({"dtype": 8}, "dtype"),
        ({"key_dtype": "fp4"}, "key_dtype"),
        ({"value_dtype": torch.int16}, "value_dtype"),
        ({"page_size": 0}, "page_size: expected .*; leave it out"),
        ({"page_size": 48}, "power of two.*; leave it out"),
        ({"page_size": 2048}, "power of two"),
        ({"page_size": 16.0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"max_cache_len": 0}, "max_cache_len"),
        ({"max_cache_len": "64"}, "max_cache_len"),
        ({"max_pages": -1}, "max_pages"),
        ({"prefill": "fast"}, "prefill: expected .*; leave it out"),
        ({"plan": "auto centered"}, "neither rotation nor a center"),
        ({"skip_layers": [7]}, "skip_layers"),
        ({"skip_layers": ["slding_attention"]}, "skip_layers"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": None}, "backend: expected a name.*; leave it out"),
        ({"scales": 0.0}, "scale"),
        ({"scales": -1.0}, "scale"),
        ({"scales": float("nan")}, "scale"),
        ({"scales": float("inf")}, "scale"),
        ({"scales": True}, "scale"),
        ({"scales": "/nowhere/kv_cache_scales.json"}, "kv_cache_scales.json"),
        ({"scales": [1.0]}, "scales"),
        ({"scales": KVScales.uniform(1)}, r"layers \[1\]"),
        ({"tensor_parallel": TensorParallel(2, 2)}, "tp_rank=2 and tp_size=2"),
        ({"tensor_parallel": (0, 2)}, r"expected the result of hf_fp8kv.tensor_parallel\(model\)"),
        ({"config": "some/model"}, r"model\.config"),
        ({"config": None, "max_cache_len": 64}, "max_cache_len"),
        ({"config": None, "skip_layers": [0]}, "skip_layers"),
        ({"offloading": True, "max_cache_len": 64}, "offloading: expected a cache that grows"),
        ({"offloading": 4, "max_cache_len": 64}, "offloading: expected a cache that grows"),
        ({"offloading": "sliding"}, "offloading: expected True, False or a number of pages above"),
        ({"offloading": 0}, "offloading: expected True, False or a number .* above 0, got 0"),
        ({"offloading": 2.5}, "offloading: expected True, False or a number of pages above 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_arguments_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(FP8KVError, match=message):
        FP8PagedCache(**{"config": config(), **keywords})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device for Triton")
def test_triton_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="triton"):
        FP8PagedCache(config(), backend="triton")


def test_scales_of_a_different_model_are_refused() -> None:
    three = LayerScales(torch.full((3, 1), 0.1), torch.full((3, 1), 0.1))
    cache = FP8PagedCache(config(), scales=KVScales({0: three, 1: three}))
    with pytest.raises(ScaleError, match="heads"):
        cache.update(tokens(3), tokens(3), 0)
    assert cache.get_seq_length() == 0
    wide = LayerScales(torch.full((2, 8), 0.1), torch.tensor(0.1))
    with pytest.raises(ScaleError, match="head size"):
        FP8PagedCache(config(), scales=KVScales({0: wide, 1: wide})).update(tokens(3), tokens(3), 0)


@pytest.mark.parametrize("preallocated", [False, True])
def test_tokens_of_a_different_model_are_refused(preallocated: bool) -> None:
    cache = FP8PagedCache(config(), max_cache_len=32 if preallocated else None, **EXACT)
    k = feed(cache, 9)
    fine = tokens(1)
    bad: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {
        "heads": (torch.zeros(2, 3, 1, DIM), torch.zeros(2, 3, 1, DIM), 0),
        "head size": (torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0),
        "batch": (tokens(1, 3), tokens(1, 3), 0),
        "dtype": (fine.bfloat16(), fine.bfloat16(), 0),
        "two dtypes": (fine, fine.bfloat16(), 0),
        "integers": (fine.int(), fine.int(), 0),
        "lengths": (tokens(2), fine, 0),
        "no token": (tokens(0), tokens(0), 0),
        "layer": (fine, fine, 2),
        "rank": (fine[0], fine[0], 0),
        "V on a different device": (fine, fine.to("meta"), 0),
        "K on a different device": (fine.to("meta"), fine, 0),
    }
    for case, (key, value, layer) in bad.items():
        with pytest.raises(ConfigError, match="expected"):
            cache.update(key, value, layer)
        assert_same(content(cache), k, case)


def test_a_failure_in_a_later_layer_changes_nothing() -> None:
    fine = LayerScales(torch.tensor(0.1), torch.tensor(0.1))
    three = LayerScales(torch.full((3, 1), 0.1), torch.tensor(0.1))
    cache = FP8PagedCache(config(), scales=KVScales({0: fine, 1: three}))
    with pytest.raises(ScaleError, match="heads"):
        feed(cache, 5)
    assert cache.get_seq_length() == cache.memory_footprint().used_bytes == 0
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 9)
    extra = tokens(4)
    for layer in range(LAYERS):
        cache.update(extra, extra, layer)
    with pytest.raises(ConfigError, match="one model"):
        cache.update(extra, extra, LAYERS)
    assert_same(content(cache), k)


def test_copies_of_empty_caches(tmp_path: Path) -> None:
    for length in (None, 32):
        cache = FP8PagedCache(config(), max_cache_len=length, **EXACT)
        for copied in (pickle.loads(pickle.dumps(cache)), cache.fork()):
            k = feed(copied, 5)
            assert_same(content(copied), k)
            assert cache.get_seq_length() == 0, "the original is still empty"
        k = feed(FP8PagedCache.load(cache.save(tmp_path / "empty.safetensors")), 3)
    sliding = FP8PagedCache(config("mistral"), **EXACT)
    sliding.activate_past_recording()
    assert sliding.fork().layers[0].record_past


# Grid: Numbers of kept tokens around a page size, and whether these are the first tokens.
@pytest.mark.parametrize(
    ("kept", "scattered"),
    [(1, True), (7, False), (8, True), (8, False), (9, True), (20, False), (21, True)],
)
def test_assigned_keys_and_values_are_stored(kept: int, scattered: bool) -> None:
    """Libraries that drop tokens assign keys and values after each layer of a call."""
    cache = FP8PagedCache(config(), page_size=8, scales=1.0)
    rows = torch.arange(21) if not scattered else torch.randperm(21)
    rows = rows[:kept]
    k = tokens(21)
    for index in range(LAYERS):
        cache.update(k + index / 2, -k - index / 2, index)
        layer = cache.layers[index]
        fork = cache.fork() if index == LAYERS - 1 else None
        layer.keys = layer.keys[:, :, rows]
        assert layer.get_seq_length() == 21, "half of an assignment changes nothing"
        layer.values = layer.values[:, :, rows]
    assert_same(content(cache), k[:, :, rows])
    extra = feed(cache, 3, seed=1)
    assert_same(content(cache), torch.cat([k[:, :, rows], extra], 2))
    assert fork is not None
    assert_same(fork.layers[1].keys.dense(), k + 0.5)


def test_assigning_the_first_tokens_does_not_encode_again() -> None:
    cache = FP8PagedCache(config(), page_size=8)
    k, v = torch.randn(2, 2, HEADS, 210, DIM)
    cache.update(k, v, 0)
    layer = cache.layers[0]
    first_tokens = [x.dense()[:, :, :170].clone() for x in (layer.keys, layer.values)]
    layer.keys, layer.values = first_tokens
    assert layer.get_seq_length() == 170
    for stored, dense in zip((layer.keys, layer.values), first_tokens, strict=True):
        assert_same(stored.dense(), dense)


def test_invalid_assignments_are_refused() -> None:
    cache = FP8PagedCache(config(), page_size=8)
    feed(cache, 9)
    layer = cache.layers[0]
    extra = torch.randn(2, HEADS, 10, DIM)
    for key, value, message in (
        (extra, extra, "at most 9"),
        (extra[:, :, :5], extra[:, :, :4], "expected keys"),
        (extra[:, :1, :5], extra[:, :1, :5], "first call's"),
        (extra[:1, :, :5], extra[:1, :, :5], "2 sequences"),
    ):
        layer.keys = key
        with pytest.raises(ConfigError, match=message):
            layer.values = value
    layer.keys = extra[:, :, :5]
    with pytest.raises(ConfigError, match="only keys"):
        cache.update(extra, extra, 0)
    layer.values = extra[:, :, :5]
    assert layer.get_seq_length() == 5
    layer.keys = extra
    cache.reset()
    feed(cache, 3)
    assert layer.get_seq_length() == 3
    window = FP8PagedCache(config("mistral", sliding_window=8)).layers[0]
    static = FP8PagedCache(config(), max_cache_len=20).layers[0]
    for layer in (window, static):
        layer.update(extra, extra)
        layer.keys = extra[:, :, :5]
        with pytest.raises(ConfigError, match=r"without a window|growing"):
            layer.values = extra[:, :, :5]


def test_an_overrun_raises_before_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the host keeps an upper bound and reads the length only near the end."""
    cache = FP8PagedCache(config(), max_cache_len=20, **EXACT)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for count in (13, 5, 2):
        cache.get_mask_sizes(count, 0)
        feed(cache, count)
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        cache.get_mask_sizes(1, 0)


def test_a_step_that_does_not_fit_in_all_layers_changes_nothing(tmp_path: Path) -> None:
    mixed = config("gemma3_text")
    cache = FP8PagedCache(mixed, max_pages=6, page_size=8)
    key = tokens(17)
    for layer in range(len(cache)):
        with pytest.raises(OutOfPagesError):
            cache.update(key, key, layer)
        assert cache.memory_footprint().used_bytes == 0
    assert cache.get_seq_length() == 0
    # Four of six pages are in use. Each of the two groups needs two more.
    for layer in range(len(cache)):
        cache.update(key[:, :, :1], key[:, :, :1], layer)
    copies = [pickle.loads(pickle.dumps(cache)), FP8PagedCache.load(cache.save(tmp_path / "x.pt"))]
    for copied in (cache, *copies):
        with pytest.raises(OutOfPagesError):
            copied.update(key[:, :, :8], key[:, :, :8], 0)
        assert copied.get_seq_length() == 1


def test_short_prompts_and_masks_are_refused() -> None:
    """`generate()` turns such prompts into calls without tokens or with a short mask."""
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    before = cache.layers[0].keys.dense()
    for prompt, padded, message in (
        (4, 0, "adds no tokens"), (10, 0, "adds no tokens"), (4, 1, "adds no tokens"),
        (12, 1, "attention_mask"), (20, 1, "attention_mask"),
    ):  # fmt: skip
        mask = torch.ones(1, prompt, dtype=torch.long)
        mask[:, :padded] = 0
        options = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 3}
        with pytest.raises(ConfigError, match=message):
            model.generate(ids[:, :prompt], **options)
    with pytest.raises(ConfigError, match="adds no tokens"):
        model(input_ids=ids[:, :0], past_key_values=cache)
    with pytest.raises(ConfigError, match="attention_mask"):
        model(input_ids=ids[:, :2], attention_mask=torch.tensor([[0, 1]]), past_key_values=cache)
    with pytest.raises(ConfigError, match="a row for each of 1 sequences, got \\(2, 22\\)"):
        model(input_ids=ids[:, :2], attention_mask=torch.ones(2, 22).long(), past_key_values=cache)
    assert_same(cache.layers[0].keys.dense(), before)
    assert cache.get_seq_length() == 20
    for rows in (1, 3):  # one row applies to all sequences
        mask = torch.ones(rows, 5, dtype=torch.long)
        logits = model(input_ids=ids[:, :5].expand(3, -1), attention_mask=mask).logits
        assert_same(logits, model(input_ids=ids[:, :5].expand(3, -1)).logits)


def test_missing_tokens_and_sequences_are_refused() -> None:
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 9)
    for length in (3, 1):
        with pytest.raises(ConfigError, match="crop"):
            cache.crop(length)
    for call in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(ConfigError, match="whole cache"):
            getattr(cache.layers[0], call)(torch.tensor([0]))
    with pytest.raises(ConfigError, match="sequences"):
        cache.reorder_cache(torch.tensor([0, 5]))
    with pytest.raises(ConfigError, match="repeats"):
        cache.batch_repeat_interleave(0)
    assert_same(content(cache), k)


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preallocated", [False, True])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"scales": 0.5},
        {"plan": "fp8 centered"},
        {"dtype": "auto"},
        {"scales": scales_per_head()},
    ],
    ids=["dynamic", "constant", "center", "auto", "per head"],
)
def test_save_and_load(preallocated: bool, keywords: dict[str, Any], tmp_path: Path) -> None:
    cache = FP8PagedCache(
        config(), page_size=8, max_cache_len=30 if preallocated else None, **keywords
    )
    feed(cache, 13)
    cache.reorder_cache(torch.tensor([1, 1]))
    path = cache.save(tmp_path / "a" / "cache.safetensors")
    twin = FP8PagedCache.load(path)
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert_same(layer.keys.dense(), other.keys.dense())
        assert_same(layer.values.dense(), other.values.dense())
    assert twin.memory_footprint().used_bytes == cache.memory_footprint().used_bytes, "still shared"
    for each in (cache, twin):
        feed(each, 4, 1)
    assert_same(cache.layers[1].keys.dense(), twin.layers[1].keys.dense())
    assert path.stat().st_size < 60_000
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no partial file remains"


@pytest.mark.parametrize("call", ["crop", "reset"])
def test_a_budget_without_pages_for_copies(call: str) -> None:
    """Two sequences share the pages of a preallocated cache, and the budget has none for copies."""
    cache = FP8PagedCache(
        config(num_hidden_layers=1), dtype="auto", page_size=16, max_cache_len=160, max_pages=18
    )
    k = tokens(40, 1)
    cache.update(k, -k, 0)
    cache.batch_repeat_interleave(2)
    if call == "crop":
        with pytest.raises(OutOfPagesError):
            cache.crop(-20)
        assert_same(cache.layers[0].keys.dense()[:, :, :40], k.repeat(2, 1, 1, 1))
        return
    cache.reset()
    new = tokens(3, 1, 1)
    cache.update(new, -new, 0)
    assert_same(cache.layers[0].keys.dense()[:, :, :3], new)


def test_sequences_may_be_selected_in_inference_mode() -> None:
    """The centers of a preallocated cache can still be written outside inference mode."""
    cache = FP8PagedCache(config(), max_cache_len=64)
    with torch.inference_mode():
        feed(cache, 12, batch=1)
        cache.batch_repeat_interleave(2)
    cache.reset()
    feed(cache, 3)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.host_length() == 3


def dense_keys(cache: Any) -> list[Any]:
    """Return the keys of each layer, with or without pages."""
    return [x.keys.dense() if hasattr(x.keys, "dense") else x.keys for x in cache.layers]


REFUSED: dict[str, Callable[[FP8PagedCache], Any]] = {
    "step": lambda cache: feed(cache, 29),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
    "crop": lambda cache: cache.crop(-2),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_refused_call_changes_no_layer_of_transformers(call: str) -> None:
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    fields = windows if call == "crop" else {}
    cache = FP8PagedCache(
        config("gemma3_text" if fields else "llama", **fields), dtype="auto", skip_layers=[0],
        page_size=8, max_pages=6,
    )  # fmt: skip
    feed(cache, 20)
    before = dense_keys(cache)
    with pytest.raises(FP8KVError):
        REFUSED[call](cache)
    assert all(map(torch.equal, dense_keys(cache), before))
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


def test_convolution_layers_next_to_paged_layers() -> None:
    """Convolution layers have no length, and can be cropped if they record the past."""
    types = {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None}
    cache = FP8PagedCache(config("lfm2", **types), dtype="auto", page_size=8, max_pages=6)
    state = tokens(20, dim=1).flatten(1, 1)[..., 0]
    cache.activate_past_recording()
    cache.layers[0].lazy_initialization(conv_states=state[..., :3])
    cache.layers[0].update_conv_state(state)
    k = tokens(20)
    cache.update(k, -k, 1)
    with pytest.raises(OutOfPagesError):
        cache.update(tokens(29), tokens(29), 1)
    assert cache.host_length() == 20
    cache.crop(-2)
    assert cache.host_length() == 18
    assert_same(cache.layers[0].conv_states[0][..., -1], state[..., 17])


def test_a_refused_long_call_frees_its_pages() -> None:
    """A sliding layer keeps its previous window until it has stored the call."""
    fields = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    cache = FP8PagedCache(config("gemma3_text", **fields), dtype="auto", page_size=8, max_pages=30)
    feed(cache, 12, batch=1)
    pages, before = cache.budget.num_held, dense_keys(cache)
    k = tokens(90, 1)
    cache.update(k, k, 0)
    assert torch.equal(dense_keys(cache)[1], before[1])
    with pytest.raises(ConfigError, match="like the first call's"):
        cache.update(k[..., :-1], k, 1)
    assert all(map(torch.equal, dense_keys(cache), before))
    assert cache.budget.num_held == pages


def test_a_window_of_one_token_keeps_its_page() -> None:
    fields = {"sliding_window": 1, "layer_types": ["full_attention", "sliding_attention"]}
    cache = FP8PagedCache(config("gemma3_text", **fields), page_size=8)
    feed(cache, 18)
    with pytest.raises(ConfigError, match="crop"):
        cache.crop(-2)
    cache.crop(-1)
    copied = pickle.loads(pickle.dumps(cache))
    assert [layer.get_seq_length() for layer in copied.layers] == [17, 17]
