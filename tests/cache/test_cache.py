"""The cache itself: contents after every operation, sizes, budgets, and what is refused."""

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_fp8kv import (
    BackendError,
    ConfigError,
    FP8PagedCache,
    KVScales,
    LayerScales,
    OutOfPagesError,
    ScaleError,
)
from hf_fp8kv.formats import FORMATS
from tests.helpers.assertions import assert_same
from tests.helpers.counting import BytesWritten
from tests.helpers.tiny_models import causal_config, tiny

pytestmark = pytest.mark.text

LAYERS, HEADS, DIM = 2, 2, 16


def config(name: str = "llama", **fields: Any) -> Any:
    return causal_config(name, **fields)


def tokens(count: int, batch: int = 2, seed: int = 0, dim: int = DIM) -> torch.Tensor:
    """`[batch, HEADS, count, dim]` of numbers that every float format of 8 bits holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (batch, HEADS, count, dim), generator=generator) / 2


def feed(cache: FP8PagedCache, count: int, seed: int = 0, batch: int = 2) -> torch.Tensor:
    """Writes tokens to every layer (K in layer i: i more than in layer 0; V: minus K)."""
    k = tokens(count, batch, seed)
    for layer in range(LAYERS):
        cache.update(k + layer / 2, -k - layer / 2, layer)
    return k


def content(cache: FP8PagedCache) -> torch.Tensor:
    """K of layer 0, after checking that the other layer and V agree with it."""
    stored = slice(0, cache.host_length())
    found = [layer.keys.dense()[:, :, stored] for layer in cache.layers]
    for i, layer in enumerate(cache.layers):
        assert_same(found[i], found[0] + i / 2)
        assert_same(layer.values.dense()[:, :, stored], -found[i])
    for group in cache.groups.values():
        group.check()
    return found[0]


# A constant scale of 1 and numbers that the format holds: what is read must be what was written.
EXACT = {"scales": 1.0, "page_size": 8}


@pytest.mark.parametrize("dtype", ["auto", *FORMATS])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 63])
def test_what_is_written_is_read(dtype: str, count: int) -> None:
    cache = FP8PagedCache(config(), dtype=dtype, **EXACT)
    parts = [feed(cache, count), feed(cache, 1, 1), feed(cache, 9, 2)]
    expected = torch.cat(parts, 2)
    # They are multiples of 1/2.
    rounded = {"fp8_e5m2": expected.to(torch.float8_e5m2).float(), "int8": expected.round()}
    if dtype in rounded:
        assert_same(cache.layers[0].keys.dense(), rounded[dtype])
    else:
        assert_same(content(cache), expected)
    assert cache.get_seq_length() == count + 10


@pytest.mark.parametrize("preallocated", [False, True])
def test_rows(preallocated: bool) -> None:
    cache = FP8PagedCache(config(), max_cache_len=40 if preallocated else None, **EXACT)
    k = feed(cache, 11)

    cache.reorder_cache(torch.tensor([1, 1]))
    assert_same(content(cache), k[[1, 1]])
    more = feed(cache, 3, 1)
    assert_same(content(cache), torch.cat([k[[1, 1]], more], 2), "rows must part ways")
    cache.batch_repeat_interleave(2)
    expected = torch.cat([k[[1, 1]], more], 2).repeat_interleave(2, 0)
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


def test_sliding_layers_give_pages_back() -> None:
    cache = FP8PagedCache(config("mistral"), **EXACT)  # a window of 8 tokens
    stock = DynamicCache(config=config("mistral"))
    for step in range(60):
        k = tokens(1, seed=step)
        for layer in range(LAYERS):
            # What attention gets to read: a window, the new token among it. Afterwards the layer
            # may forget the first of these.
            got = cache.update(k + layer / 2, -k - layer / 2, layer)
            expected = stock.update(k + layer / 2, -k - layer / 2, layer)
            for side, shown, whole in zip("KV", got, expected, strict=True):
                shown = shown.dense() if step else shown  # the first call reads its own tokens
                assert_same(shown, whole, f"step {step}, layer {layer}, {side}")
        assert cache.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0)
    table = cache.groups[8].table
    assert table.used().shape == (2, 2), "a window of 8 in pages of 8 spans two pages"
    assert cache.memory_footprint()["used"] < 60 * 2 * 2 * 16 * 2 * 2
    with pytest.raises(ConfigError, match="activate_past_recording"):
        cache.crop(-20)
    cache.activate_past_recording()
    held = [feed(cache, 1, 100 + i) for i in range(20)]
    cache.crop(-20)
    assert cache.get_seq_length() == 60
    again = feed(cache, 1, 100)
    assert_same(again, held[0])


def test_layers_may_advance_apart() -> None:
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 10)
    for _ in range(3):
        cache.update(tokens(1), -tokens(1), 0)
    assert [layer.get_seq_length() for layer in cache.layers] == [13, 10]
    cache.layers[0].crop(-3)
    assert_same(content(cache), k)


def test_forks_share_and_part() -> None:
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 20)
    held = cache.budget.held
    forks = [cache.fork() for _ in range(5)]
    assert cache.budget.held == held
    for i, fork in enumerate(forks):
        feed(fork, 1, 10 + i)
    # Each fork has its own copy of the last, partly filled page of each sequence, and no more.
    assert cache.budget.held == held + 5 * 2
    for i, fork in enumerate(forks):
        assert_same(content(fork), torch.cat([k, tokens(1, seed=10 + i)], 2))
    assert_same(content(cache), k)
    tables = [fork.groups[None].table for fork in forks]
    cache.groups[None].table.check(*tables)
    gone = weakref.ref(forks[0])
    del forks, fork, tables
    assert gone() is None, "a cycle keeps dropped forks alive"
    assert cache.budget.held == held
    feed(cache, 1)
    assert cache.budget.held == held, "the last holder writes in place"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_copies_of_a_preallocated_cache_take_no_more_pages(name: str, tmp_path: Path) -> None:
    cache = FP8PagedCache(config(name), max_cache_len=20, **EXACT)
    k = feed(cache, 11)
    taken = cache.memory_footprint()
    twins = [cache.fork(), pickle.loads(pickle.dumps(cache)),
             FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))]  # fmt: skip
    for twin in twins:
        assert twin.memory_footprint() == taken
        for i, layer in enumerate(twin.layers):
            # A ring holds no more than the window.
            assert layer.keys.start == (11 - 8 + 1 if layer.is_sliding else 0)
            found = layer.keys.dense()[:, :, : 11 - layer.keys.start]
            assert_same(found, k[:, :, layer.keys.start :] + i / 2, f"layer {i}")


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


def test_dropping_the_original_leaves_the_fork() -> None:
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 20)
    fork = cache.fork()
    del cache
    assert_same(content(fork), k)
    fork.reset()
    assert fork.memory_footprint()["total"] < 1000, "memory goes when nobody holds a page"


def test_a_fork_of_16k_tokens_copies_no_tokens_and_takes_no_pages() -> None:
    cache = FP8PagedCache(config())
    for layer in range(LAYERS):
        big = torch.randn(1, HEADS, 16384, DIM)
        cache.update(big, big, layer)
    held = cache.budget.held
    with BytesWritten() as written:
        fork = cache.fork()
    assert cache.budget.held == held
    # Page numbers may be copied, pages may not.
    assert written.total <= 8 * held
    del fork


def test_beams_of_16k_tokens_are_reordered_without_copies() -> None:
    cache, stock = FP8PagedCache(config()), DynamicCache(config=config())
    for layer in range(LAYERS):
        big = torch.randn(4, HEADS, 16384, 64)
        cache.update(big, big, layer)
        stock.update(big, big, layer)
    index = torch.tensor([2, 0, 0, 3])

    def copied(target: Any) -> int:
        with BytesWritten() as written:
            target.reorder_cache(index)
        return written.total

    held = cache.budget.held
    assert copied(stock) >= sum(2 * layer.keys.nbytes for layer in stock.layers)
    assert copied(cache) <= 100 * held, "page numbers may be copied, pages may not"
    assert cache.budget.held < held, "the pages of the sequence that went are free"


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
    assert footprint["total"] <= share * bf16, footprint
    assert footprint["used"] <= footprint["pages"] + footprint["scales"]
    assert footprint["tokens"] == 8195


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
    # Numbers near what a scale for E4M3FN was made for: 448 times the scale, per head.
    unit = tokens(9).sign() * torch.linspace(0.3, 1.0, 9)[:, None]
    for i in range(LAYERS):
        layer = scales.layers[i]
        cache.update(unit * 447 * layer.k[:, None], unit * 447 * layer.v[:, None], i)
    # The smallest number is 0.3 of the largest.
    relative = max(2.0 ** -(fmt.mantissa_bits + 1), fmt.min_subnormal / 2 / (0.299 * fmt.max))
    for i, layer in enumerate(cache.layers):
        for side, handle in (("k", layer.keys), ("v", layer.values)):
            want = unit * 447 * getattr(scales.layers[i], side)[:, None]
            error = ((handle.dense() - want).abs() / want.abs().clamp(min=1e-6)).amax()
            assert error <= relative * 1.01, (side, error)


def test_scales_of_k_and_v_are_not_swapped() -> None:
    scales = KVScales.uniform(LAYERS, k=0.25, v=2.0)
    cache = FP8PagedCache(config(), scales=scales, page_size=8)
    cache.update(tokens(3), tokens(3), 0)
    pool = cache.layers[0].pool
    codes = [FORMATS["fp8_e4m3"], pool.k[0, :, :3], pool.v[0].transpose(1, 2)[:, :3]]
    from hf_fp8kv.formats.codec import decode

    assert_same(decode(codes[1], codes[0]) * 0.25, tokens(3)[0])
    assert_same(decode(codes[2], codes[0]) * 2.0, tokens(3)[0])


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e3m4"])
def test_dynamic_scales_do_not_depend_on_company(dtype: str) -> None:
    """Batch mates, padding and the way a text is cut must not change a token's bytes."""
    k = torch.randn(2, HEADS, 20, DIM) * torch.logspace(-3, 3, 20)[:, None]
    whole = FP8PagedCache(config(), page_size=8, dtype=dtype)
    whole.update(k, -k, 0)
    alone = FP8PagedCache(config(), page_size=8, dtype=dtype)
    for part in k[1:].split(3, dim=2):
        alone.update(part, -part, 0)
    assert_same(whole.layers[0].keys.dense()[1:], alone.layers[0].keys.dense())
    error = (whole.layers[0].keys.dense() - k).abs().amax(-1) / k.abs().amax(-1)
    assert error.max() <= 2.0**-4, "each token has a scale of its own"


def test_centers_remove_a_common_bias() -> None:
    bias = 50 * torch.randn(1, HEADS, 1, DIM)
    k = torch.randn(2, HEADS, 64, DIM) + bias
    v = torch.randn(2, HEADS, 64, DIM)
    errors = {}
    for center in (False, True):
        cache = FP8PagedCache(center_keys=center)
        cache.update(k, v, 0)
        errors[center] = (cache.layers[0].keys.dense() - k).pow(2).mean().sqrt()
        assert_same(cache.layers[0].keys.dense(), cache.fork().layers[0].keys.dense())
    assert errors[True] < errors[False] / 10
    scales = KVScales(
        {
            i: LayerScales(torch.tensor(0.01), torch.tensor(0.01), bias[0, :, 0])
            for i in range(LAYERS)
        }
    )
    for center in (None, True):
        cache = FP8PagedCache(config(), scales=scales, center_keys=center)
        cache.update(k, v, 0)
        assert_same(cache.layers[0].k_center[1], bias[0, :, 0])
    assert FP8PagedCache(config(), scales=scales, center_keys=False).options.center_keys is False


def test_nan_is_not_hidden() -> None:
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


def test_a_declared_scale_that_is_not_used_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    declared = config()
    declared.quantization_config = {
        "quant_method": "compressed-tensors", "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
    }  # fmt: skip
    from hf_fp8kv.utils import warn_once

    warn_once._WARNED.clear()
    for _ in range(2):
        FP8PagedCache(declared)
    assert sum("declares static KV scales" in r.message for r in caplog.records) == 1
    FP8PagedCache(declared, scales=scales_per_head())
    assert len(caplog.records) == 1


# -- skip_layers, offload, layers of other kinds -------------------------------------------------


def test_skip_layers() -> None:
    mixed = config("gemma3_text")
    kinds = mixed.layer_types
    by_type = FP8PagedCache(mixed, skip_layers=["sliding_attention"])
    for kind, layer in zip(kinds, by_type.layers, strict=True):
        assert (type(layer).__name__ == "FP8PagedLayer") == (kind != "sliding_attention")
    by_number = FP8PagedCache(mixed, skip_layers=(0, -1))
    stock = [type(layer).__name__ != "FP8PagedLayer" for layer in by_number.layers]
    assert stock == [True, *[False] * (len(kinds) - 2), True]


def test_offload_and_prefetch() -> None:
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 9)
    for layer in cache.layers:
        layer.offload()
    assert_same(content(cache), k)
    for layer in cache.layers:
        layer.prefetch()
    assert_same(content(cache), k)


def test_without_a_config_layers_come_as_asked() -> None:
    cache = FP8PagedCache(**EXACT)
    k = feed(cache, 9)
    assert len(cache) == LAYERS
    assert_same(content(cache), k)
    assert len(cache.fork()) == LAYERS


# -- what is refused, before anything changes ----------------------------------------------------


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
        ({"center_keys": "yes"}, "center_keys: expected .*; leave it out"),
        ({"center_keys": True, "dtype": "auto"}, "center_keys"),
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
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments(keywords: dict[str, Any], message: str) -> None:
    from hf_fp8kv import Fp8KVError

    with pytest.raises(Fp8KVError, match=message):
        FP8PagedCache(config(), **keywords)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device for Triton")
def test_triton_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="triton"):
        FP8PagedCache(config(), backend="triton")


def test_a_config_is_a_config() -> None:
    with pytest.raises(ConfigError, match=r"model\.config"):
        FP8PagedCache("some/model")
    with pytest.raises(ConfigError, match="max_cache_len"):
        FP8PagedCache(max_cache_len=64)
    with pytest.raises(ConfigError, match="skip_layers"):
        FP8PagedCache(skip_layers=[0])


def test_scales_of_another_model() -> None:
    with pytest.raises(ScaleError, match=r"layers \[1\]"):
        FP8PagedCache(config(), scales=KVScales.uniform(1))
    three = LayerScales(torch.full((3, 1), 0.1), torch.full((3, 1), 0.1))
    cache = FP8PagedCache(config(), scales=KVScales({0: three, 1: three}))
    with pytest.raises(ScaleError, match="heads"):
        cache.update(tokens(3), tokens(3), 0)
    assert cache.get_seq_length() == 0
    wide = LayerScales(torch.full((2, 8), 0.1), torch.tensor(0.1))
    with pytest.raises(ScaleError, match="head size"):
        FP8PagedCache(config(), scales=KVScales({0: wide, 1: wide})).update(tokens(3), tokens(3), 0)


@pytest.mark.parametrize("preallocated", [False, True])
def test_tokens_of_another_model(preallocated: bool) -> None:
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
    }
    for what, (key, value, layer) in bad.items():
        with pytest.raises(ConfigError, match="expected"):
            cache.update(key, value, layer)
        assert_same(content(cache), k, what)


def test_a_failure_in_a_later_layer_leaves_no_trace() -> None:
    fine = LayerScales(torch.tensor(0.1), torch.tensor(0.1))
    three = LayerScales(torch.full((3, 1), 0.1), torch.tensor(0.1))
    cache = FP8PagedCache(config(), scales=KVScales({0: fine, 1: three}))
    with pytest.raises(ScaleError, match="heads"):
        feed(cache, 5)
    assert cache.get_seq_length() == 0
    assert cache.budget.held == 0
    cache = FP8PagedCache(config(), **EXACT)
    k = feed(cache, 9)
    more = tokens(4)
    for layer in range(LAYERS):
        cache.update(more, more, layer)
    with pytest.raises(ConfigError, match="one model"):
        cache.update(more, more, LAYERS)
    assert_same(content(cache), k)


def test_empty_caches_travel(tmp_path: Path) -> None:

    for length in (None, 32):
        cache = FP8PagedCache(config(), max_cache_len=length, **EXACT)
        for twin in (pickle.loads(pickle.dumps(cache)), cache.fork()):
            k = feed(twin, 5)
            assert_same(content(twin), k)
        k = feed(FP8PagedCache.load(cache.save(tmp_path / "empty.safetensors")), 3)
    sliding = FP8PagedCache(config("mistral"), **EXACT)
    sliding.activate_past_recording()
    assert sliding.fork().layers[0].record_past


def test_handles_are_read_only() -> None:
    cache = FP8PagedCache(config(), **EXACT)
    feed(cache, 5)
    with pytest.raises(ConfigError, match="writes into them"):
        cache.layers[0].keys.mul_(2)


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 20, 21])
@pytest.mark.parametrize("scattered", [False, True])
def test_assigned_keys_and_values_are_stored(kept: int, scattered: bool) -> None:
    """What libraries that drop tokens do, with DynamicCache, after each layer of a call."""
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
    more = feed(cache, 3, seed=1)
    assert_same(content(cache), torch.cat([k[:, :, rows], more], 2))
    assert fork is not None
    assert_same(fork.layers[1].keys.dense(), k + 0.5)


def test_the_first_tokens_are_kept_without_encoding_them_again() -> None:
    cache = FP8PagedCache(config(), page_size=8)
    k, v = torch.randn(2, HEADS, 21, DIM), torch.randn(2, HEADS, 21, DIM)
    cache.update(k, v, 0)
    layer = cache.layers[0]
    before = layer.pool.k.clone()
    layer.keys, layer.values = layer.keys[:, :, :17], layer.values[:, :, :17]
    assert layer.get_seq_length() == 17
    assert_same(layer.pool.k, before)


def test_what_cannot_be_assigned() -> None:
    cache = FP8PagedCache(config(), page_size=8)
    feed(cache, 9)
    layer = cache.layers[0]
    before = layer.keys.dense()
    more = torch.randn(2, HEADS, 10, DIM)
    for key, value, message in (
        (more, more, "at most 9"),
        (more[:, :, :5], more[:, :, :4], "expected keys"),
        (more[:, :1, :5], more[:, :1, :5], "first call's"),
        (more[:1, :, :5], more[:1, :, :5], "2 sequences"),
    ):
        layer.keys = key
        with pytest.raises(ConfigError, match=message):
            layer.values = value
    layer.keys = more[:, :, :5]
    with pytest.raises(ConfigError, match="keys alone"):
        cache.update(more, more, 0)
    layer.values = more[:, :, :5]
    assert layer.get_seq_length() == 5
    assert before.shape[2] == 9
    layer.keys = more
    cache.reset()
    feed(cache, 3)
    assert layer.get_seq_length() == 3
    window = FP8PagedCache(config("mistral", sliding_window=8)).layers[0]
    static = FP8PagedCache(config(), max_cache_len=20).layers[0]
    for other in (window, static):
        other.update(more, more)
        other.keys = more[:, :, :5]
        with pytest.raises(ConfigError, match=r"without a window|growing"):
            other.values = more[:, :, :5]


def test_overrun_where_a_write_cannot_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the host keeps an upper bound and looks only when it may matter."""
    cache = FP8PagedCache(config(), max_cache_len=20, **EXACT)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for count in (13, 5, 2):
        cache.get_mask_sizes(count, 0)
        feed(cache, count)
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        cache.get_mask_sizes(1, 0)


def test_budget() -> None:
    cache = FP8PagedCache(config(), max_pages=6, **EXACT)
    k = feed(cache, 20)  # 2 sequences x 3 pages
    for _ in range(2):
        with pytest.raises(OutOfPagesError, match="max_pages") as caught:
            feed(cache, 5)
        assert (caught.value.needed, caught.value.available) == (2, 0)
    assert_same(content(cache), k)
    fork = cache.fork()
    with pytest.raises(OutOfPagesError):
        feed(fork, 1)
    assert_same(content(fork), k)
    del fork
    more = feed(cache, 4)
    assert_same(content(cache), torch.cat([k, more], 2))


def test_a_step_fits_for_every_kind_of_layer_or_changes_nothing() -> None:
    mixed = config("gemma3_text")
    cache = FP8PagedCache(mixed, max_pages=6, page_size=8)
    key = tokens(17)
    for layer in range(len(cache)):
        with pytest.raises(OutOfPagesError):
            cache.update(key, key, layer)
        assert cache.budget.held == 0
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("prompt", "padded", "message"),
    [(4, 0, "does not hold yet"), (10, 0, "does not hold yet"), (4, 1, "does not hold yet"),
     (12, 1, "attention_mask"), (20, 1, "attention_mask")],
)  # fmt: skip
def test_a_prompt_that_is_not_longer(prompt: int, padded: int, message: str) -> None:
    """What `generate()` makes of such a prompt: no token, or a mask that is too short."""
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    before = cache.layers[0].keys.dense()
    mask = torch.ones(1, prompt, dtype=torch.long)
    mask[:, :padded] = 0
    with pytest.raises(ConfigError, match=message):
        model.generate(
            ids[:, :prompt], attention_mask=mask, past_key_values=cache, max_new_tokens=3
        )
    assert_same(cache.layers[0].keys.dense(), before)
    assert cache.get_seq_length() == 20


def test_a_call_without_tokens_or_with_a_short_mask() -> None:
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    with pytest.raises(ConfigError, match="does not hold yet"):
        model(input_ids=ids[:, :0], past_key_values=cache)
    with pytest.raises(ConfigError, match="attention_mask"):
        model(input_ids=ids[:, :2], attention_mask=torch.tensor([[0, 1]]), past_key_values=cache)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("number", [3, 1])
def test_crop_takes_a_number_below_one(number: int) -> None:
    cache = FP8PagedCache(config(), **EXACT)
    feed(cache, 9)
    with pytest.raises(ConfigError, match="crop"):
        cache.crop(number)
    for call in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(ConfigError, match="whole cache"):
            getattr(cache.layers[0], call)(torch.tensor([0]))
    with pytest.raises(ConfigError, match="sequences"):
        cache.reorder_cache(torch.tensor([0, 5]))
    with pytest.raises(ConfigError, match="repeats"):
        cache.batch_repeat_interleave(0)


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preallocated", [False, True])
@pytest.mark.parametrize(
    "keywords",
    [{}, {"scales": 0.5}, {"center_keys": True}, {"dtype": "auto"}, {"scales": "per head"}],
    ids=str,
)
def test_save_and_load(preallocated: bool, keywords: dict[str, Any], tmp_path: Path) -> None:
    if keywords.get("scales") == "per head":
        keywords = {"scales": scales_per_head()}
    cache = FP8PagedCache(
        config(), page_size=8, max_cache_len=30 if preallocated else None, **keywords
    )
    feed(cache, 13)
    cache.reorder_cache(torch.tensor([1, 1]))
    path = cache.save(tmp_path / "a" / "cache.safetensors")
    twin = FP8PagedCache.load(path)
    for mine, other in zip(cache.layers, twin.layers, strict=True):
        assert_same(mine.keys.dense(), other.keys.dense())
        assert_same(mine.values.dense(), other.values.dense())
    if not preallocated:
        assert twin.budget.held == cache.budget.held, "shared pages stay shared"
    for one in (cache, twin):
        feed(one, 4, 1)
    assert_same(cache.layers[1].keys.dense(), twin.layers[1].keys.dense())
    assert path.stat().st_size < 60_000
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no partial file is left"


def test_a_file_that_is_not_ours(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    cache = FP8PagedCache(config(), **EXACT)
    feed(cache, 13)
    path = cache.save(tmp_path / "cache.safetensors")
    whole = path.read_bytes()
    wrong = tmp_path / "wrong.safetensors"
    for damage in (whole[:100], whole[: len(whole) // 2], b"", b"x" * 100, whole[:-1]):
        wrong.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"wrong\.safetensors"):
            FP8PagedCache.load(wrong)
    save_file({"a": torch.zeros(1)}, wrong)
    with pytest.raises(ConfigError, match="expected a cache saved by this library"):
        FP8PagedCache.load(wrong)
    with pytest.raises(ConfigError, match="nowhere"):
        FP8PagedCache.load(tmp_path / "nowhere.safetensors")


def test_a_fork_of_an_empty_cache_is_its_own() -> None:
    cache = FP8PagedCache(config(), max_pages=4, **EXACT)
    fork = cache.fork()
    k = feed(cache, 3)
    more = feed(fork, 5, 1)
    assert_same(content(cache), k)
    assert_same(content(fork), more)
    with pytest.raises(OutOfPagesError):
        feed(fork, 8, 2)
