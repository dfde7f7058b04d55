"""Tests that cache operations also apply to the indexer of sparse attention."""

import pickle
from unittest import mock

import pytest
import torch
from transformers.cache_utils import DynamicIndexedLayer

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.errors import ConfigError, OutOfPagesError
from tests.cache.public import get_shared_variant
from tests.helpers.tiny_models import list_types

pytestmark = [
    pytest.mark.text,
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.filterwarnings("ignore"),
]

# Model types with an indexer. Each query attends to 8 of the 21 tokens of a prompt.
MODEL_TYPES = ["deepseek_v32", "glm5_next", "qwen4_exp_text"]
CACHE_OPTIONS = {"growing": {}, "preallocated": {"max_cache_len": 32}}
for_each_model = pytest.mark.parametrize("model", MODEL_TYPES, indirect=True)


@pytest.fixture
def model(request):
    name = getattr(request, "param", MODEL_TYPES[0])
    if name not in list_types():
        pytest.skip(f"this version of transformers has no {name}")
    return get_shared_variant(name, "fp8_paged")[0]


@pytest.fixture(params=CACHE_OPTIONS)
def cache_options(request):
    return CACHE_OPTIONS[request.param]


@pytest.fixture
def ids():
    return torch.randint(4, 90, (2, 21), generator=torch.Generator().manual_seed(5))


def fill_cache(model, ids, **cache_options):
    cache = FP8PagedCache(model.config, dtype="auto", page_size=8, **cache_options)
    model(ids[:, :12], past_key_values=cache)
    model(ids[:, 12:], past_key_values=cache)
    return cache


def assert_same_continuation(model, cache, ids):
    """Assert that three more tokens have the same logits as in one call without a cache."""
    next_ids = torch.randint(4, 90, (len(ids), 3), generator=torch.Generator().manual_seed(6))
    expected = model(torch.cat([ids, next_ids], 1), use_cache=False).logits[:, -3:]
    first_logits = model(next_ids[:, :1], past_key_values=cache).logits
    later_logits = model(next_ids[:, 1:], past_key_values=cache).logits
    actual = torch.cat([first_logits, later_logits], 1)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@for_each_model
def test_indexed_layers_are_paged(model, cache_options, ids):
    cache = fill_cache(model, ids, **cache_options)
    assert cache.paged_layers
    indexer_bytes = sum(layer.indexer_keys.nbytes for layer in cache.paged_layers)
    assert cache.memory_footprint().other_bytes >= indexer_bytes > 0
    for layer in cache.paged_layers:
        layer.offload()
    cache.paged_layers[0].prefetch()
    cache.reorder_cache(torch.tensor([1, 1]))
    assert_same_continuation(model, cache, ids[[1, 1]])


# A change of a cache, the rows that it then has, and the number of their tokens.
CHANGES = {
    "crop": (lambda cache: cache.crop(-5), [0, 1], 16),
    "crop all": (lambda cache: cache.crop(-21), [0, 1], 0),
    "reset": (FP8PagedCache.reset, [0, 1], 0),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1], 21),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1], 21),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cache_operations_apply_to_the_indexer(model, cache_options, ids, change):
    change_cache, rows, num_tokens = CHANGES[change]
    cache = fill_cache(model, ids, **cache_options)
    change_cache(cache)
    if not num_tokens:
        model(ids[:, 3:14], past_key_values=cache)
    assert_same_continuation(model, cache, ids[rows, :num_tokens] if num_tokens else ids[:, 3:14])


@for_each_model
def test_copies_contain_the_indexer(model, cache_options, ids, tmp_path):
    cache = fill_cache(model, ids, **cache_options)
    if hasattr(cache, "position_ids"):
        pytest.skip("this version of transformers keeps positions as an attribute of the cache")
    copies = [cache.fork(), pickle.loads(pickle.dumps(cache))]
    if not any(cache.is_linear):  # linear layers have no file format
        cache.save(tmp_path / "cache")
        copies.append(FP8PagedCache.load(tmp_path / "cache"))
    # A change of the original must not change the copies.
    model(ids[:, :4], past_key_values=cache)
    for copy in copies:
        assert_same_continuation(model, copy, ids)
    fork = FP8PagedCache(model.config, dtype="auto", **cache_options).fork()  # of an empty cache
    model(ids, past_key_values=fork)
    assert_same_continuation(model, fork, ids)


def test_a_step_that_does_not_fit_is_undone(model, ids):
    cache = fill_cache(model, ids, max_pages=8)
    error = OutOfPagesError.for_tokens(0, 0, 2)
    with (
        mock.patch.object(cache.paged_layers[1], "update", side_effect=error),
        pytest.raises(OutOfPagesError),
    ):
        model(ids[:, :2], past_key_values=cache)
    assert cache.paged_layers[0].indexer_keys.shape[1] == ids.shape[1]
    assert_same_continuation(model, cache, ids)


def test_assigning_some_tokens_is_refused(model, ids):
    cache = fill_cache(model, ids)
    layer = cache.paged_layers[0]
    value = layer.values.dense()
    layer.keys = layer.keys.dense()[:, :, 1:]
    with pytest.raises(ConfigError, match="Its indexer has keys of all tokens"):
        layer.values = value[:, :, 1:]
    assert_same_continuation(model, cache, ids)


def test_skipped_indexed_layers_are_transformers_layers(model, ids):
    cache = FP8PagedCache(model.config, dtype="auto", skip_layers=model.config.layer_types[:1])
    assert all(type(layer) is DynamicIndexedLayer for layer in cache.layers)
    model(ids, past_key_values=cache)
    assert_same_continuation(model, cache, ids)
