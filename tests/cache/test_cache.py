"""Tests of `FP8PagedCache`: contents after every operation, sizes, budgets, invalid arguments."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from hf_fp8kv.utils import warn_once
from tests.helpers.assertions import assert_same
from tests.helpers.counting import WrittenBytesCounter
from tests.helpers.tiny_models import build_variant, make_causal_config

pytestmark = pytest.mark.text

NUM_LAYERS = 2
NUM_HEADS = 2
HEAD_DIM = 16
CONFIG = make_causal_config("llama")


def make_keys(num_tokens: int, batch: int = 2, dim: int = HEAD_DIM) -> torch.Tensor:
    """Return random `[batch, NUM_HEADS, num_tokens, dim]`, which 8-bit floats represent exactly."""
    return torch.randint(-8, 9, (batch, NUM_HEADS, num_tokens, dim)) / 2


def add_tokens(cache: FP8PagedCache, num_tokens: int) -> torch.Tensor:
    """Store tokens in all layers, and return K of layer 0. Layer i adds i / 2 to K, and V is -K."""
    k = make_keys(num_tokens)
    for index in range(NUM_LAYERS):
        cache.update(k + index / 2, -k - index / 2, index)
    return k


def read_checked_keys(cache: FP8PagedCache) -> torch.Tensor:
    """Return K of layer 0, after checking that K of layer 1 and V of both layers match it."""
    span = slice(0, cache.host_length())
    keys = [layer.keys.dense()[:, :, span] for layer in cache.layers]
    for index, layer in enumerate(cache.layers):
        assert_same(keys[index], keys[0] + index / 2)
        assert_same(layer.values.dense()[:, :, span], -keys[index])
    return keys[0]


# With a constant scale of 1 and values that a format represents, reads return written values.
EXACT = {"scales": 1.0, "page_size": 8}


def test_forks_and_beams_of_4k_tokens_copy_no_tokens() -> None:
    cache = FP8PagedCache(CONFIG)
    states = torch.randn(4, NUM_HEADS, 4096, 64)
    for index in range(NUM_LAYERS):
        cache.update(states, states, index)
    initial_footprint = cache.memory_footprint()
    with WrittenBytesCounter() as counter:
        cache.fork()
        cache.reorder_cache(torch.tensor([2, 0, 0, 3]))
    # A fork and a reorder copy the page numbers of 4 sequences, with at most 100 bytes per page.
    assert counter.num_bytes <= 2 * 100 * 4 * 4096 // 64
    footprint = cache.memory_footprint()
    assert footprint.pages_bytes <= initial_footprint.pages_bytes
    # The pages of the dropped sequence are free.
    assert footprint.used_bytes == initial_footprint.used_bytes * 3 // 4


def test_an_unused_declared_scale_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    declared_config = make_causal_config("llama")
    declared_config.quantization_config = {
        "quant_method": "compressed-tensors", "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
    }  # fmt: skip
    warn_once._logged_messages.clear()
    for _ in range(2):
        FP8PagedCache(declared_config)
    assert caplog.text.count("declares static KV scales") == 1
    FP8PagedCache(declared_config, scales=KVScales.uniform(NUM_LAYERS))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        (["sliding_attention"], [1, 3]),
        ("full_attention", [0, 2]),
        ((0, -1), [1, 2]),
        (1, [0, 2, 3]),
    ],
)
def test_skipped_layers_are_not_paged(skipped: Any, expected: list[int]) -> None:
    fields = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    cache = FP8PagedCache(make_causal_config("gemma3_text", **fields), skip_layers=skipped)
    assert [layer.index for layer in cache.paged_layers] == expected


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dtype": "int3"}, "dtype: expected one of"),
        ({"page_size": 48}, r"power of two.*\. Leave it out"),
        ({"max_cache_len": 0}, "max_cache_len"),
        ({"prefill": "fast"}, r"prefill: expected .*\. Leave it out"),
        ({"skip_layers": [7]}, "skip_layers"),
        ({"skip_layers": ["slding_attention"]}, "skip_layers"),
        ({"dtype": torch.bfloat16}, "dtype: .*Pass 'model'"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": None}, r"backend: expected a name.*\. Leave it out"),
        ({"scales": 0.0}, "scale"),
        ({"scales": "/nowhere/kv_cache_scales.json"}, "kv_cache_scales.json"),
        ({"scales": [1.0]}, "scales"),
        ({"scales": KVScales.uniform(1)}, r"layers \[1\]"),
        ({"tensor_parallel": TensorParallel(2, 2)}, "tp_rank=2 and tp_size=2"),
        ({"tensor_parallel": (0, 2)}, r"expected the result of hf_fp8kv.tensor_parallel\(model\)"),
        ({"config": "some/model"}, r"FP8PagedCache\(model\)"),
        ({"config": None, "max_cache_len": 64}, "max_cache_len"),
        ({"offloading": True, "max_cache_len": 64}, "offloading: expected a cache that grows"),
        ({"offloading": 0}, "offloading: expected True, False or a .* of at least 1, got 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_arguments_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(FP8KVError, match=message):
        FP8PagedCache(**{"config": CONFIG, **keywords})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device for Triton")
def test_triton_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="triton"):
        FP8PagedCache(CONFIG, backend="triton")


def test_scales_of_a_different_model_are_refused() -> None:
    """The config defines the heads and their sizes, so the error precedes the first call."""
    constant = torch.tensor(0.1)
    invalid_layers = {
        "expected 2 heads, got 4": LayerScales(torch.full((4, 1), 0.1), constant),  # per query head
        "V scale .* expected 2 heads, got 3": LayerScales(constant, torch.full((3, 1), 0.1)),
        f"expected a head size of {HEAD_DIM}": LayerScales(torch.full((2, 8), 0.1), constant),
        "V scale .* expected a head size": LayerScales(constant, torch.full((2, 8), 0.1)),
        "center of K .* expected 2 heads": LayerScales(
            constant, constant, torch.zeros(4, HEAD_DIM)
        ),
        "center of K .* expected a head size": LayerScales(constant, constant, torch.zeros(2, 8)),
    }
    for message, layer in invalid_layers.items():
        for first_layer in (layer, LayerScales(constant, constant)):
            with pytest.raises(ScaleError, match=message):
                FP8PagedCache(CONFIG, scales=KVScales({0: first_layer, 1: layer}))
    per_query_head = KVScales(
        dict.fromkeys(range(2), LayerScales(torch.full((4, 1), 0.1), constant))
    )
    with pytest.raises(ScaleError, match=r"expected 1 heads \(or 2 of all 2 ranks\), got 4"):
        FP8PagedCache(CONFIG, scales=per_query_head, tensor_parallel=TensorParallel(0, 2))
    cache = FP8PagedCache(scales=per_query_head)  # without a config, the first call defines them
    with pytest.raises(ScaleError, match="expected 2 heads, got 4"):
        cache.update(make_keys(3), make_keys(3), 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["mimo_v2_flash", "deepseek_v3", "falcon", "gemma4_text"])
@torch.no_grad()
def test_scales_of_heads_that_the_config_does_not_define_are_accepted(name: str) -> None:
    """The code of these models changes the heads, or their config has a size for each layer."""
    model, inputs = build_variant(name, attn_implementation="eager")
    ids = inputs["input_ids"][:, :9]
    filled_cache = FP8PagedCache(model.config)
    model(ids, past_key_values=filled_cache)
    layer_scales = {}
    for layer in filled_cache.paged_layers:
        k_scale = torch.full((layer.pool.num_heads, layer.pool.k_dim), 0.1)
        layer_scales[layer.index] = LayerScales(k_scale, k_scale[:, :1])
    cache = FP8PagedCache(model.config, scales=KVScales(layer_scales))
    model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("is_preallocated", [False, True])
def test_invalid_tokens_are_refused(is_preallocated: bool) -> None:
    cache = FP8PagedCache(CONFIG, max_cache_len=32 if is_preallocated else None, **EXACT)
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
        "V on another device": (k_token, k_token.to("meta"), 0),
        "K on another device": (k_token.to("meta"), k_token, 0),
    }
    for case, (key, value, layer_index) in invalid_calls.items():
        # Autocast during a single call changes the dtype, not the model.
        is_dtype = case in ("dtype", "two dtypes")
        message = r"torch\.float32.*torch\.autocast" if is_dtype else "expected"
        with pytest.raises(ConfigError, match=message) as caught:
            cache.update(key, value, layer_index)
        assert not (is_dtype and "different model" in str(caught.value))
        assert_same(read_checked_keys(cache), k, case)


def test_assigning_the_first_tokens_does_not_encode_again() -> None:
    cache = FP8PagedCache(CONFIG, page_size=8)
    k, v = torch.randn(2, 2, NUM_HEADS, 210, HEAD_DIM)
    cache.update(k, v, 0)
    layer = cache.layers[0]
    first_tokens = [handle.dense()[:, :, :170].clone() for handle in (layer.keys, layer.values)]
    layer.keys, layer.values = first_tokens
    assert layer.get_seq_length() == 170
    for handle, dense in zip((layer.keys, layer.values), first_tokens, strict=True):
        assert_same(handle.dense(), dense)


def test_invalid_assignments_are_refused() -> None:
    cache = FP8PagedCache(CONFIG, page_size=8)
    add_tokens(cache, 9)
    layer = cache.layers[0]
    states = torch.randn(2, NUM_HEADS, 10, HEAD_DIM)
    invalid_states = (
        (states, states, "at most 9"),
        (states[:, :, :5], states[:, :, :4], "expected keys"),
        (states[:, :1, :5], states[:, :1, :5], "first call's"),
        (states[:1, :, :5], states[:1, :, :5], "2 sequences"),
    )
    for key, value, message in invalid_states:
        layer.keys = key
        with pytest.raises(ConfigError, match=message):
            layer.values = value
    layer.keys = states[:, :, :5]
    with pytest.raises(ConfigError, match="only keys"):
        cache.update(states, states, 0)
    cache.reset()
    add_tokens(cache, 3)
    assert layer.get_seq_length() == 3
    sliding_layer = FP8PagedCache(make_causal_config("mistral", sliding_window=8)).layers[0]
    preallocated_layer = FP8PagedCache(CONFIG, max_cache_len=20).layers[0]
    for refusing_layer in (sliding_layer, preallocated_layer):
        refusing_layer.update(states, states)
        refusing_layer.keys = states[:, :, :5]
        with pytest.raises(ConfigError, match=r"without a window|growing"):
            refusing_layer.values = states[:, :, :5]


def test_an_overrun_raises_before_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the host tracks an upper bound, and reads the length only near `max_cache_len`."""
    cache = FP8PagedCache(CONFIG, max_cache_len=20, **EXACT)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for num_tokens in (13, 5, 2):
        cache.get_mask_sizes(num_tokens, 0)
        add_tokens(cache, num_tokens)
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        cache.get_mask_sizes(1, 0)


@torch.no_grad()
def test_short_prompts_and_masks_are_refused() -> None:
    """For these prompts, `generate()` calls the model with a short mask or without tokens."""
    model, _ = build_variant("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config)
    ids = torch.arange(2, 22)[None]
    model(input_ids=ids, past_key_values=cache)
    stored_k = cache.layers[0].keys.dense()
    for num_tokens, num_padding in ((4, 0), (10, 0), (4, 1), (12, 1), (20, 1)):
        message = "adds no tokens" if num_tokens <= 10 else "attention_mask"
        mask = torch.ones(1, num_tokens, dtype=torch.long)
        mask[:, :num_padding] = 0
        with pytest.raises(ConfigError, match=message):
            model.generate(
                ids[:, :num_tokens], attention_mask=mask, past_key_values=cache, max_new_tokens=3
            )
    invalid_inputs = (
        (ids[:, :0], None, "adds no tokens"),
        (ids[:, :2], torch.tensor([[0, 1]]), "attention_mask"),
        (ids[:, :2], torch.ones(2, 22).long(), r"a row for each of 1 sequences, got \(2, 22\)"),
    )
    for new_ids, mask, message in invalid_inputs:
        with pytest.raises(ConfigError, match=message):
            model(new_ids, attention_mask=mask, past_key_values=cache)
    assert_same(cache.layers[0].keys.dense(), stored_k)
    assert cache.get_seq_length() == 20
    for num_rows in (1, 3):  # a single row applies to all sequences
        mask = torch.ones(num_rows, 5, dtype=torch.long)
        logits = model(input_ids=ids[:, :5].expand(3, -1), attention_mask=mask).logits
        assert_same(logits, model(input_ids=ids[:, :5].expand(3, -1)).logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.crop(3), "crop"),
        (lambda cache: cache.layers[0].reorder_cache(torch.tensor([0])), "whole cache"),
        (lambda cache: cache.layers[0].batch_repeat_interleave(1), "whole cache"),
        (lambda cache: cache.layers[0].batch_select_indices([0]), "whole cache"),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 5])), "sequences"),
        (lambda cache: cache.reorder_cache(torch.tensor([0.9])), "indices"),
        (lambda cache: cache.batch_select_indices(torch.tensor([-3])), "indices"),
        (lambda cache: cache.batch_select_indices(torch.tensor([True] * 3)), "indices"),
        (lambda cache: cache.batch_repeat_interleave(0), "repeats"),
        (lambda cache: cache.batch_repeat_interleave(True), "repeats"),
    ],
)
def test_invalid_crops_and_sequences_are_refused(
    call: Callable[[FP8PagedCache], Any], message: str
) -> None:
    cache = FP8PagedCache(CONFIG, **EXACT)
    k = add_tokens(cache, 9)
    with pytest.raises(ConfigError, match=message):
        call(cache)
    assert_same(read_checked_keys(cache), k)


def test_errors_about_a_path_or_a_device_do_not_mention_a_damaged_file(tmp_path: Path) -> None:
    cache = FP8PagedCache(CONFIG)
    add_tokens(cache, 5)
    path = cache.save(tmp_path / "cache.safetensors")
    assert FP8PagedCache.load(path, device="cpu").get_seq_length() == 5
    invalid_calls: tuple[tuple[dict[str, Any], str], ...] = (
        ({"path": tmp_path / "missing"}, "got none. Check the path"),
        ({"path": tmp_path}, "got a folder. Check the path"),
        ({"path": path, "device": "nowhere"}, "device: expected .*nowhere"),
    )
    for arguments, message in invalid_calls:
        with pytest.raises(ConfigError, match=message):
            FP8PagedCache.load(**arguments)


def list_dense_keys(cache: Any) -> list[Any]:
    return [
        layer.keys.dense() if hasattr(layer.keys, "dense") else layer.keys for layer in cache.layers
    ]


REFUSED_CALLS: dict[str, Callable[[FP8PagedCache], Any]] = {
    "step": lambda cache: add_tokens(cache, 29),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
    "crop": lambda cache: cache.crop(-2),
}


@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_a_refused_call_changes_no_layer_of_transformers(call: str) -> None:
    config = CONFIG
    if call == "crop":
        layer_types = ["sliding_attention", "full_attention"]
        config = make_causal_config("gemma3_text", sliding_window=8, layer_types=layer_types)
    cache = FP8PagedCache(config, dtype="auto", skip_layers=[0], page_size=8, max_pages=6)
    add_tokens(cache, 20)
    keys = list_dense_keys(cache)
    with pytest.raises(FP8KVError):
        REFUSED_CALLS[call](cache)
    assert all(map(torch.equal, list_dense_keys(cache), keys))
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


def test_a_refused_step_raises_its_error_if_layers_share_keys() -> None:
    config = make_causal_config("gemma3n_text", num_kv_shared_layers=1)
    cache = FP8PagedCache(config, page_size=8, max_pages=8)
    with pytest.raises(OutOfPagesError, match="max_pages"):
        cache.update(make_keys(40), make_keys(40), 0)
    cache.update(make_keys(9), make_keys(9), 0)


def test_convolution_layers_are_cropped_with_paged_layers() -> None:
    """Convolution layers have no length, and can be cropped if they record the past."""
    fields = {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None}
    cache = FP8PagedCache(make_causal_config("lfm2", **fields), dtype="auto", page_size=8)
    state = make_keys(20, dim=1)[..., 0]
    keys = make_keys(20)
    cache.activate_past_recording()
    cache.layers[0].lazy_initialization(conv_states=state[..., :3])
    cache.layers[0].update_conv_state(state)
    cache.update(keys, -keys, 1)
    cache.crop(-2)
    assert cache.host_length() == 18
    assert_same(cache.layers[0].conv_states[0][..., -1], state[..., 17])


def test_a_copied_layer_has_separate_pages() -> None:
    cache = FP8PagedCache(CONFIG, **EXACT)
    k = add_tokens(cache, 9)
    layer_copy = copy.deepcopy(cache.layers[0])
    cache.reset()
    add_tokens(cache, 9)
    assert_same(layer_copy.keys.dense(), k)


def test_copies_have_the_attributes_of_a_subclass() -> None:
    class NamedCache(FP8PagedCache):
        def __init__(self, name: str) -> None:
            super().__init__(CONFIG)
            self.name = name

    cache = NamedCache("first")
    add_tokens(cache, 5)
    for copied_cache in (cache.fork(), copy.copy(cache), copy.deepcopy(cache)):
        assert type(copied_cache) is NamedCache
        copied_cache.name += ", copied"
        assert copied_cache.name == "first, copied"
    assert cache.name == "first"
