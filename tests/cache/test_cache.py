"""Tests of `FP8PagedCache`: contents after every operation, sizes, budgets, invalid arguments."""

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
    enable,
)
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from hf_fp8kv.utils import warn_once
from tests.helpers.assertions import assert_same
from tests.helpers.counting import BytesWritten
from tests.helpers.tiny_models import build_variant, make_causal_config

pytestmark = pytest.mark.text

NUM_LAYERS = 2
NUM_HEADS = 2
HEAD_DIM = 16


def make_config(name: str = "llama", **fields: Any) -> Any:
    return make_causal_config(name, **fields)


def make_keys(num_tokens: int, batch: int = 2, seed: int = 0, dim: int = HEAD_DIM) -> torch.Tensor:
    """Return `[batch, NUM_HEADS, num_tokens, dim]`. 8-bit floats represent the values exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (batch, NUM_HEADS, num_tokens, dim), generator=generator) / 2


def add_tokens(
    cache: FP8PagedCache, num_tokens: int, seed: int = 0, batch: int = 2
) -> torch.Tensor:
    """Store tokens in all layers, and return K of layer 0. Layer i adds i / 2 to K, and V is -K."""
    k = make_keys(num_tokens, batch, seed)
    for layer in range(NUM_LAYERS):
        cache.update(k + layer / 2, -k - layer / 2, layer)
    return k


def read_checked_keys(cache: FP8PagedCache) -> torch.Tensor:
    """Return K of layer 0, after checking that K of layer 1 and V of both layers match it."""
    span = slice(0, cache.host_length())
    keys = [layer.keys.dense()[:, :, span] for layer in cache.layers]
    for i, layer in enumerate(cache.layers):
        assert_same(keys[i], keys[0] + i / 2)
        assert_same(layer.values.dense()[:, :, span], -keys[i])
    return keys[0]


# With a constant scale of 1 and values that a format represents, reads return written values.
EXACT = {"scales": 1.0, "page_size": 8}


# The format determines the codes, and the number of tokens determines where a page ends.
@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [*((dtype, 9) for dtype in ("auto", *FORMATS)), (None, 1), (None, 7), (None, 8), (None, 63)],
)
def test_written_tokens_are_read(dtype: str | None, num_tokens: int) -> None:
    cache = FP8PagedCache(make_config(), dtype=dtype, **EXACT)
    keys = [add_tokens(cache, num_tokens), add_tokens(cache, 1, 1), add_tokens(cache, 9, 2)]
    expected = torch.cat(keys, 2)
    # All values are multiples of 1/2.
    rounded_k = {
        "fp8_e5m2": expected.to(torch.float8_e5m2).float(), "int8": expected.round(),
        "int6": expected.round().clamp(-31, 31), "int4": expected.round().clamp(-7, 7),
    }  # fmt: skip
    if dtype in rounded_k:
        assert_same(cache.layers[0].keys.dense(), rounded_k[dtype])
    else:
        assert_same(read_checked_keys(cache), expected)
    assert cache.get_seq_length() == num_tokens + 10


@pytest.mark.parametrize(("dtype", "max_len"), [("bfloat16", None), ("float16", 40)])
def test_auto_stores_sixteen_bits_unchanged(dtype: str, max_len: int | None) -> None:
    k = torch.randn(2, NUM_HEADS, 21, HEAD_DIM).to(getattr(torch, dtype))
    cache = FP8PagedCache(make_config(), dtype="auto", page_size=8, max_cache_len=max_len)
    for chunk in k.split(7, 2):
        cache.update(chunk, -chunk, 1)
    for handle, expected in ((cache.layers[1].keys, k), (cache.layers[1].values, -k)):
        assert_same(handle.dense()[:, :, :21], expected)


def test_forks_share_and_diverge() -> None:
    # 2 sequences have 3 pages, and each of 5 forks copies the last page of each sequence.
    cache = FP8PagedCache(make_config(), max_pages=6 + 5 * 2, **EXACT)
    k = add_tokens(cache, 20)
    forks = [cache.fork() for _ in range(6)]
    for i, fork in enumerate(forks[:5]):
        add_tokens(fork, 1, 10 + i)
    for num_tokens, num_needed in ((1, 2), (1, 2), (5, 4)):  # copied pages, and new pages
        with pytest.raises(OutOfPagesError, match="max_pages") as error:
            add_tokens(forks[5], num_tokens)
        assert (error.value.needed, error.value.available) == (num_needed, 0)
    for i, fork in enumerate(forks[:5]):
        assert_same(read_checked_keys(fork), torch.cat([k, make_keys(1, seed=10 + i)], 2))
    for unchanged in (forks[5], cache):
        assert_same(read_checked_keys(unchanged), k)
    # Deleted forks free their pages at once, and the last cache that uses a page writes in place.
    del forks, fork, unchanged, error
    next_k = add_tokens(cache, 44, 1)
    fork = cache.fork()
    del cache
    assert_same(read_checked_keys(fork), torch.cat([k, next_k], 2))
    fork.reset()
    assert fork.memory_footprint().total_bytes < 1000, "no page is in use"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_copies_of_a_preallocated_cache_allocate_equal_pages(name: str, tmp_path: Path) -> None:
    cache = FP8PagedCache(make_config(name), max_cache_len=20, **EXACT)
    add_tokens(cache, 11)
    footprint = cache.memory_footprint()
    copies = [cache.fork(), pickle.loads(pickle.dumps(cache)),
             FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))]  # fmt: skip
    for copied in copies:
        assert copied.memory_footprint() == footprint


def test_copies_have_the_attributes_of_a_subclass() -> None:
    class NamedCache(FP8PagedCache):
        def __init__(self, name: str) -> None:
            super().__init__(make_config())
            self.name = name

    cache = NamedCache("first")
    add_tokens(cache, 5)
    for copied in (cache.fork(), copy.copy(cache), copy.deepcopy(cache)):
        assert type(copied) is NamedCache
        copied.name += ", copied"
        assert copied.name == "first, copied"
    assert cache.name == "first"


def test_forks_and_beams_of_16k_tokens_copy_no_tokens() -> None:
    cache, stock_cache = FP8PagedCache(make_config()), DynamicCache(config=make_config())
    for layer in range(NUM_LAYERS):
        x = torch.randn(4, NUM_HEADS, 16384, 64)
        cache.update(x, x, layer)
        stock_cache.update(x, x, layer)
    index = torch.tensor([2, 0, 0, 3])
    initial_footprint = cache.memory_footprint()
    bytes_written = []
    for call in (stock_cache.reorder_cache, lambda _: cache.fork(), cache.reorder_cache):
        with BytesWritten() as counter:
            call(index)
        bytes_written.append(counter.total)
    assert bytes_written[0] >= sum(2 * layer.keys.nbytes for layer in stock_cache.layers)
    # A fork or a reorder copies the indices of pages of 64 tokens.
    assert max(bytes_written[1:]) <= 100 * 4 * 16384 // 64
    footprint = cache.memory_footprint()
    assert footprint.pages_bytes <= initial_footprint.pages_bytes
    # The pages of the dropped sequence are free.
    assert footprint.used_bytes == initial_footprint.used_bytes * 3 // 4


@pytest.mark.parametrize(("keywords", "max_ratio"), [({}, 0.54), ({"scales": 1.0}, 0.52)])
@pytest.mark.parametrize("dim", [64, 128])
def test_8k_tokens_need_half_the_memory(keywords: dict, max_ratio: float, dim: int) -> None:
    cache = FP8PagedCache(make_config(head_dim=dim), **keywords)
    for layer in range(NUM_LAYERS):
        x = torch.randn(1, NUM_HEADS, 8192, dim, dtype=torch.bfloat16)
        cache.update(x, x, layer)
        for _ in range(3):
            cache.update(x[:, :, :1], x[:, :, :1], layer)
    footprint = cache.memory_footprint()
    bf16_bytes = 8195 * NUM_LAYERS * NUM_HEADS * dim * 2 * 2
    assert footprint.total_bytes <= max_ratio * bf16_bytes, footprint
    assert footprint.used_bytes <= footprint.pages_bytes + footprint.scales_bytes
    assert footprint.tokens == 8195


# -- scales and centers --------------------------------------------------------------------------


K_SCALE, V_SCALE = torch.tensor([[0.01], [0.04]]), torch.tensor([[0.5], [0.002]])
HEAD_SCALES = KVScales(
    {i: LayerScales(K_SCALE * (i + 1), V_SCALE * (i + 1)) for i in range(NUM_LAYERS)}
)


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_static_scales_are_converted_to_the_format(dtype: str) -> None:
    cache = FP8PagedCache(make_config(), dtype=dtype, scales=HEAD_SCALES, page_size=8)
    fmt = FORMATS[dtype]
    # Values are up to 448 times the scale of each head, the range that a scale for E4M3FN covers.
    unit = make_keys(9).sign() * torch.linspace(0.3, 1.0, 9)[:, None]
    for i in range(NUM_LAYERS):
        layer = HEAD_SCALES.layers[i]
        cache.update(unit * 447 * layer.k[:, None], unit * 447 * layer.v[:, None], i)
    # The smallest value is 0.3 of the largest.
    max_error = max(2.0 ** -(fmt.mantissa_bits + 1), fmt.min_subnormal / 2 / (0.299 * fmt.max))
    for i, layer in enumerate(cache.layers):
        for side, handle in (("k", layer.keys), ("v", layer.values)):
            expected = unit * 447 * getattr(HEAD_SCALES.layers[i], side)[:, None]
            error = ((handle.dense() - expected).abs() / expected.abs().clamp(min=1e-6)).amax()
            assert error <= max_error * 1.01, (side, error)


def test_centers_of_scales_remove_a_common_bias() -> None:
    bias = 50 * torch.randn(1, NUM_HEADS, 1, HEAD_DIM)
    layer = LayerScales(torch.tensor(0.01), torch.tensor(0.01), bias[0, :, 0])
    scales = KVScales(dict.fromkeys(range(NUM_LAYERS), layer))
    # Static scales saturate far below the bias. A key equal to the center is stored as 0.
    for max_len in (None, 3):
        cache = FP8PagedCache(make_config(), scales=scales, max_cache_len=max_len)
        for batch in (2, 3):
            cache.update(bias.repeat(batch, 1, 3, 1), make_keys(3, batch), 0)
            cache.reorder_cache(torch.tensor([1] * batch))
            assert_same(cache.layers[0].keys.dense(), bias.repeat(batch, 1, 3, 1))
            cache.reset()


def test_an_unused_declared_scale_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    declared_config = make_config()
    declared_config.quantization_config = {
        "quant_method": "compressed-tensors", "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
    }  # fmt: skip
    warn_once._logged_messages.clear()
    for _ in range(2):
        FP8PagedCache(declared_config)
    assert sum("declares static KV scales" in r.message for r in caplog.records) == 1
    FP8PagedCache(declared_config, scales=HEAD_SCALES)
    assert len(caplog.records) == 1


# -- layers that are not paged -------------------------------------------------------------------


def test_skipped_layers_are_not_paged() -> None:
    mixed_config = make_config("gemma3_text")
    layer_types = mixed_config.layer_types
    by_type = FP8PagedCache(mixed_config, skip_layers=["sliding_attention"])
    for layer_type, layer in zip(layer_types, by_type.layers, strict=True):
        assert (type(layer).__name__ == "FP8PagedLayer") == (layer_type != "sliding_attention")
    by_index = FP8PagedCache(mixed_config, skip_layers=(0, -1))
    is_stock = [type(layer).__name__ != "FP8PagedLayer" for layer in by_index.layers]
    assert is_stock == [True, *[False] * (len(layer_types) - 2), True]


# -- refused calls change nothing ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dtype": "int3"}, "dtype: expected one of"),
        ({"dtype": 8}, "dtype"),
        ({"key_dtype": "fp4"}, "key_dtype"),
        ({"value_dtype": torch.int16}, "value_dtype"),
        ({"page_size": 0}, r"page_size: expected .*\. Leave it out"),
        ({"page_size": 48}, r"power of two.*\. Leave it out"),
        ({"page_size": 2048}, "power of two"),
        ({"page_size": 16.0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"max_cache_len": 0}, "max_cache_len"),
        ({"max_cache_len": "64"}, "max_cache_len"),
        ({"max_pages": -1}, "max_pages"),
        ({"prefill": "fast"}, r"prefill: expected .*\. Leave it out"),
        ({"plan": "auto centered"}, "neither rotation nor a center"),
        ({"skip_layers": [7]}, "skip_layers"),
        ({"skip_layers": ["slding_attention"]}, "skip_layers"),
        ({"skip_layers": None}, "skip_layers: .*None"),
        ({"skip_layers": 0.5}, r"skip_layers: .*0\.5"),
        ({"dtype": torch.bfloat16}, "dtype: .*Pass 'model'"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": None}, r"backend: expected a name.*\. Leave it out"),
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
        ({"config": "some/model"}, r"FP8PagedCache\(model\)"),
        ({"config": None, "max_cache_len": 64}, "max_cache_len"),
        ({"config": None, "skip_layers": [0]}, "skip_layers"),
        ({"offloading": True, "max_cache_len": 64}, "offloading: expected a cache that grows"),
        ({"offloading": 4, "max_cache_len": 64}, "offloading: expected a cache that grows"),
        ({"offloading": "sliding"}, "offloading: expected True, False or a .* of at least 1"),
        ({"offloading": 0}, "offloading: expected True, False or a .* of at least 1, got 0"),
        ({"offloading": 2.5}, "offloading: expected True, False or a .* of at least 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_arguments_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(FP8KVError, match=message):
        FP8PagedCache(**{"config": make_config(), **keywords})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device for Triton")
def test_triton_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="triton"):
        FP8PagedCache(make_config(), backend="triton")


def test_scales_of_a_different_model_are_refused() -> None:
    """The config defines the heads and their sizes, so no call of the model is needed."""
    one, config = torch.tensor(0.1), make_config()
    invalid_layers = {
        "expected 2 heads, got 4": LayerScales(torch.full((4, 1), 0.1), one),  # per query head
        "V scale .* expected 2 heads, got 3": LayerScales(one, torch.full((3, 1), 0.1)),
        f"expected a head size of {HEAD_DIM}": LayerScales(torch.full((2, 8), 0.1), one),
        "V scale .* expected a head size": LayerScales(one, torch.full((2, 8), 0.1)),
        "center of K .* expected 2 heads": LayerScales(one, one, torch.zeros(4, HEAD_DIM)),
        "center of K .* expected a head size": LayerScales(one, one, torch.zeros(2, 8)),
    }
    for message, layer in invalid_layers.items():
        for layers in ({0: layer, 1: layer}, {0: LayerScales(one, one), 1: layer}):
            with pytest.raises(ScaleError, match=message):
                FP8PagedCache(config, scales=KVScales(layers))
    per_query_head = KVScales(dict.fromkeys(range(2), LayerScales(torch.full((4, 1), 0.1), one)))
    with pytest.raises(ScaleError, match=r"expected 1 heads \(or 2 of all 2 ranks\), got 4"):
        FP8PagedCache(config, scales=per_query_head, tensor_parallel=TensorParallel(0, 2))
    cache = FP8PagedCache(scales=per_query_head)  # without a config, the first call defines them
    with pytest.raises(ScaleError, match="expected 2 heads, got 4"):
        cache.update(make_keys(3), make_keys(3), 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["mimo_v2_flash", "deepseek_v3", "falcon", "gemma4_text"])
def test_scales_of_heads_that_the_config_does_not_define_are_accepted(name: str) -> None:
    """The code of these models changes the heads, or their config has a size for each layer."""
    model, inputs = build_variant(name, attn_implementation="eager")
    ids = inputs["input_ids"][:, :9]
    layers = enable(model).generate(ids, max_new_tokens=1, return_dict_in_generate=True)
    pools = {layer.index: layer.store.pool for layer in layers.past_key_values.paged_layers}
    scales = KVScales({
        i: LayerScales(torch.full((x.num_heads, x.k_dim), 0.1), torch.full((x.num_heads, 1), 0.1))
        for i, x in pools.items()
    })  # fmt: skip
    with torch.no_grad():
        cache = FP8PagedCache(model.config, scales=scales)
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("is_preallocated", [False, True])
def test_tokens_of_a_different_model_are_refused(is_preallocated: bool) -> None:
    cache = FP8PagedCache(make_config(), max_cache_len=32 if is_preallocated else None, **EXACT)
    k = add_tokens(cache, 9)
    k_token = make_keys(1)
    invalid_calls: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {
        "heads": (torch.zeros(2, 3, 1, HEAD_DIM), torch.zeros(2, 3, 1, HEAD_DIM), 0),
        "head size": (torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0),
        "batch": (make_keys(1, 3), make_keys(1, 3), 0),
        "dtype": (k_token.bfloat16(), k_token.bfloat16(), 0),
        "two dtypes": (k_token, k_token.bfloat16(), 0),
        "integers": (k_token.int(), k_token.int(), 0),
        "lengths": (make_keys(2), k_token, 0),
        "no token": (make_keys(0), make_keys(0), 0),
        "layer": (k_token, k_token, 2),
        "rank": (k_token[0], k_token[0], 0),
        "V on a different device": (k_token, k_token.to("meta"), 0),
        "K on a different device": (k_token.to("meta"), k_token, 0),
    }
    for case, (key, value, layer) in invalid_calls.items():
        # Autocast in one turn changes the dtype, not the model.
        is_dtype = case in ("dtype", "two dtypes")
        message = r"torch\.float32.*torch\.autocast" if is_dtype else "expected"
        with pytest.raises(ConfigError, match=message) as caught:
            cache.update(key, value, layer)
        assert not is_dtype or "different model" not in str(caught.value)
        assert_same(read_checked_keys(cache), k, case)


def test_a_failure_in_a_later_layer_changes_nothing() -> None:
    valid_scales = LayerScales(torch.tensor(0.1), torch.tensor(0.1))
    three_heads = LayerScales(torch.full((3, 1), 0.1), torch.tensor(0.1))
    cache = FP8PagedCache(scales=KVScales({0: valid_scales, 1: three_heads}))
    with pytest.raises(ScaleError, match="heads"):
        add_tokens(cache, 5)
    assert cache.get_seq_length() == cache.memory_footprint().used_bytes == 0
    cache = FP8PagedCache(make_config(), **EXACT)
    k = add_tokens(cache, 9)
    x = make_keys(4)
    for layer in range(NUM_LAYERS):
        cache.update(x, x, layer)
    with pytest.raises(ConfigError, match="one model"):
        cache.update(x, x, NUM_LAYERS)
    assert_same(read_checked_keys(cache), k)


# Numbers of kept tokens around multiples of the page size. The kept tokens are first or random.
@pytest.mark.parametrize(
    ("num_kept", "is_shuffled"),
    [(1, True), (7, False), (8, True), (8, False), (9, True), (20, False), (21, True)],
)
def test_assigned_keys_and_values_are_stored(num_kept: int, is_shuffled: bool) -> None:
    """Libraries that drop tokens assign keys and values after each layer of a call."""
    cache = FP8PagedCache(make_config(), page_size=8, scales=1.0)
    indices = torch.arange(21) if not is_shuffled else torch.randperm(21)
    indices = indices[:num_kept]
    k = make_keys(21)
    for index in range(NUM_LAYERS):
        cache.update(k + index / 2, -k - index / 2, index)
        layer = cache.layers[index]
        fork = cache.fork() if index == NUM_LAYERS - 1 else None
        layer.keys = layer.keys[:, :, indices]
        assert layer.get_seq_length() == 21, "assigning only keys changes nothing"
        layer.values = layer.values[:, :, indices]
    assert_same(read_checked_keys(cache), k[:, :, indices])
    next_k = add_tokens(cache, 3, seed=1)
    assert_same(read_checked_keys(cache), torch.cat([k[:, :, indices], next_k], 2))
    assert fork is not None
    assert_same(fork.layers[1].keys.dense(), k + 0.5)


def test_assigning_the_first_tokens_does_not_encode_again() -> None:
    cache = FP8PagedCache(make_config(), page_size=8)
    k, v = torch.randn(2, 2, NUM_HEADS, 210, HEAD_DIM)
    cache.update(k, v, 0)
    layer = cache.layers[0]
    first_tokens = [x.dense()[:, :, :170].clone() for x in (layer.keys, layer.values)]
    layer.keys, layer.values = first_tokens
    assert layer.get_seq_length() == 170
    for handle, dense in zip((layer.keys, layer.values), first_tokens, strict=True):
        assert_same(handle.dense(), dense)


def test_invalid_assignments_are_refused() -> None:
    cache = FP8PagedCache(make_config(), page_size=8)
    add_tokens(cache, 9)
    layer = cache.layers[0]
    x = torch.randn(2, NUM_HEADS, 10, HEAD_DIM)
    for key, value, message in (
        (x, x, "at most 9"),
        (x[:, :, :5], x[:, :, :4], "expected keys"),
        (x[:, :1, :5], x[:, :1, :5], "first call's"),
        (x[:1, :, :5], x[:1, :, :5], "2 sequences"),
    ):
        layer.keys = key
        with pytest.raises(ConfigError, match=message):
            layer.values = value
    layer.keys = x[:, :, :5]
    with pytest.raises(ConfigError, match="only keys"):
        cache.update(x, x, 0)
    layer.values = x[:, :, :5]
    assert layer.get_seq_length() == 5
    layer.keys = x
    cache.reset()
    add_tokens(cache, 3)
    assert layer.get_seq_length() == 3
    sliding_layer = FP8PagedCache(make_config("mistral", sliding_window=8)).layers[0]
    preallocated_layer = FP8PagedCache(make_config(), max_cache_len=20).layers[0]
    for layer in (sliding_layer, preallocated_layer):
        layer.update(x, x)
        layer.keys = x[:, :, :5]
        with pytest.raises(ConfigError, match=r"without a window|growing"):
            layer.values = x[:, :, :5]


def test_an_overrun_raises_before_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the host keeps an upper bound and reads the length only near the end."""
    cache = FP8PagedCache(make_config(), max_cache_len=20, **EXACT)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for num_tokens in (13, 5, 2):
        cache.get_mask_sizes(num_tokens, 0)
        add_tokens(cache, num_tokens)
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        cache.get_mask_sizes(1, 0)


def test_short_prompts_and_masks_are_refused() -> None:
    """`generate()` turns such prompts into calls without tokens or with a short mask."""
    model, _ = build_variant("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    stored_k = cache.layers[0].keys.dense()
    for num_tokens, num_padding, message in (
        (4, 0, "adds no tokens"), (10, 0, "adds no tokens"), (4, 1, "adds no tokens"),
        (12, 1, "attention_mask"), (20, 1, "attention_mask"),
    ):  # fmt: skip
        mask = torch.ones(1, num_tokens, dtype=torch.long)
        mask[:, :num_padding] = 0
        options = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 3}
        with pytest.raises(ConfigError, match=message):
            model.generate(ids[:, :num_tokens], **options)
    with pytest.raises(ConfigError, match="adds no tokens"):
        model(input_ids=ids[:, :0], past_key_values=cache)
    with pytest.raises(ConfigError, match="attention_mask"):
        model(input_ids=ids[:, :2], attention_mask=torch.tensor([[0, 1]]), past_key_values=cache)
    with pytest.raises(ConfigError, match="a row for each of 1 sequences, got \\(2, 22\\)"):
        model(input_ids=ids[:, :2], attention_mask=torch.ones(2, 22).long(), past_key_values=cache)
    assert_same(cache.layers[0].keys.dense(), stored_k)
    assert cache.get_seq_length() == 20
    for rows in (1, 3):  # one row applies to all sequences
        mask = torch.ones(rows, 5, dtype=torch.long)
        logits = model(input_ids=ids[:, :5].expand(3, -1), attention_mask=mask).logits
        assert_same(logits, model(input_ids=ids[:, :5].expand(3, -1)).logits)


def test_invalid_crops_and_sequences_are_refused() -> None:
    cache = FP8PagedCache(make_config(), **EXACT)
    k = add_tokens(cache, 9)
    for length in (3, 1):
        with pytest.raises(ConfigError, match="crop"):
            cache.crop(length)
    for call in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(ConfigError, match="whole cache"):
            getattr(cache.layers[0], call)(torch.tensor([0]))
    with pytest.raises(ConfigError, match="sequences"):
        cache.reorder_cache(torch.tensor([0, 5]))
    for indices in (torch.tensor([5]), torch.tensor([-3]), torch.tensor([True] * 3)):
        with pytest.raises(ConfigError, match="indices"):
            cache.batch_select_indices(indices)
    with pytest.raises(ConfigError, match="indices"):
        cache.reorder_cache(torch.tensor([0.9]))
    for repeats in (0, 1.5, True):
        with pytest.raises(ConfigError, match="repeats"):
            cache.batch_repeat_interleave(repeats)
    assert_same(read_checked_keys(cache), k)


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["crop", "reset"])
def test_a_reset_needs_no_pages_for_copies(call: str) -> None:
    """Two sequences share pages of a preallocated cache, and the budget has no pages for copies."""
    options = {"dtype": "auto", "page_size": 16, "max_cache_len": 160, "max_pages": 18}
    cache = FP8PagedCache(make_config(num_hidden_layers=1), **options)
    k = make_keys(40, 1)
    cache.update(k, -k, 0)
    cache.batch_repeat_interleave(2)
    if call == "crop":
        with pytest.raises(OutOfPagesError):
            cache.crop(-20)
        assert_same(cache.layers[0].keys.dense()[:, :, :40], k.repeat(2, 1, 1, 1))
        return
    cache.reset()
    new_k = make_keys(3, 1, 1)
    cache.update(new_k, -new_k, 0)
    assert_same(cache.layers[0].keys.dense()[:, :, :3], new_k)


def test_a_preallocated_cache_beyond_its_budget_allocates_nothing() -> None:
    cache = FP8PagedCache(make_config(), page_size=16, max_cache_len=160, max_pages=12)
    with pytest.raises(OutOfPagesError, match="20 more with 0 in use"):
        add_tokens(cache, 3, batch=2)
    add_tokens(cache, 3, batch=1)


def test_a_file_is_not_blamed_for_a_path_or_a_device(tmp_path: Path) -> None:
    cache = FP8PagedCache(make_config())
    add_tokens(cache, 5)
    path = cache.save(tmp_path / "cache.safetensors")
    invalid_calls: tuple[tuple[dict[str, Any], str], ...] = (
        ({"path": tmp_path / "missing"}, "got none. Check the path"),
        ({"path": tmp_path}, "got a folder. Check the path"),
        ({"path": path, "device": "nowhere"}, "device: expected .*nowhere"),
    )
    for arguments, message in invalid_calls:
        with pytest.raises(ConfigError, match=message) as caught:
            FP8PagedCache.load(**arguments)
        assert "Fetch" not in str(caught.value)
    assert FP8PagedCache.load(path, device="cpu").get_seq_length() == 5


def list_dense_keys(cache: Any) -> list[Any]:
    """Return the dense keys of each layer, with or without pages."""
    return [x.keys.dense() if hasattr(x.keys, "dense") else x.keys for x in cache.layers]


REFUSED_CALLS: dict[str, Callable[[FP8PagedCache], Any]] = {
    "step": lambda cache: add_tokens(cache, 29),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
    "crop": lambda cache: cache.crop(-2),
}


@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_a_refused_call_changes_no_layer_of_transformers(call: str) -> None:
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    fields = windows if call == "crop" else {}
    cache = FP8PagedCache(
        make_config("gemma3_text" if fields else "llama", **fields), dtype="auto", skip_layers=[0],
        page_size=8, max_pages=6,
    )  # fmt: skip
    add_tokens(cache, 20)
    keys = list_dense_keys(cache)
    with pytest.raises(FP8KVError):
        REFUSED_CALLS[call](cache)
    assert all(map(torch.equal, list_dense_keys(cache), keys))
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


def test_convolution_layers_are_cropped_with_paged_layers() -> None:
    """Convolution layers have no length, and can be cropped if they record the past."""
    fields = {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None}
    cache = FP8PagedCache(make_config("lfm2", **fields), dtype="auto", page_size=8, max_pages=6)
    state = make_keys(20, dim=1).flatten(1, 1)[..., 0]
    cache.activate_past_recording()
    cache.layers[0].lazy_initialization(conv_states=state[..., :3])
    cache.layers[0].update_conv_state(state)
    k = make_keys(20)
    cache.update(k, -k, 1)
    with pytest.raises(OutOfPagesError):
        cache.update(make_keys(29), make_keys(29), 1)
    assert cache.host_length() == 20
    cache.crop(-2)
    assert cache.host_length() == 18
    assert_same(cache.layers[0].conv_states[0][..., -1], state[..., 17])
