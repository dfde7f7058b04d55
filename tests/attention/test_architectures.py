"""The sweep over model types: equal tokens with `dtype="auto"`, in every type that can run.

About forty types run in the fast tier; `make test-all` runs every type that transformers builds.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.helpers.sweep import Row, answer, baseline, check_type, compare, counts, sweep
from tests.helpers.tiny_models import VARIANTS, build, tiny, type_names

# What transformers says about odd tiny configurations is no concern of these tests.
pytestmark = [pytest.mark.text, pytest.mark.filterwarnings("ignore")]

# One type for each way of using a cache, and what attention gets there under "fp8_paged".
PATHS = {
    "llama": "fused",
    "qwen2": "fused",
    "qwen3": "fused",
    "mistral": "fused",
    "mixtral": "fused",
    "phi3": "fused",
    "gpt2": "fused",
    "gpt_neox": "fused",
    "opt": "fused",
    "cohere2": "fused",
    "gemma2": "fused",
    "gemma3_text": "fused",
    "gemma3n_text": "fused",
    "gemma4_text": "fused, dense",
    "gpt_oss": "fused",
    "llama4_text": "fused",
    "qwen3_next": "fused",
    "lfm2": "fused",
    "jamba": "fused",
    "diffllama": "dense",
    "doge": "fused",
    "deepseek_v3": "fused, latent",
    "glm_moe_dsa": "fused, latent",
    "deepseek_v4": "dense",
    "inkling2_text": "dense",
    "zamba2": "dense",
    "bert": "fused",
    "bart": "fused",
    "git": "own",
    "bigbird_pegasus": "fused",
    "bloom": "not switched; from_pretrained: own",
    "rembert": "not switched; from_pretrained: own",
    "falcon": "refused",
    "gptj": "refused",
    "seq2seq/bart": "fused",
    "seq2seq/t5": "fused",
    "seq2seq/whisper": "fused, dense",
    "seq2seq/t5gemma": "fused, dense",
    "seq2seq/nllb-moe": "fused",
    "seq2seq/moonshine": "fused",
    "vision/llava": "fused",
    "vision/gemma3": "fused",
    "vision/qwen2_vl": "fused",
}
REFUSED = ("refused", "not switched")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small only lose by sharing their work out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _check(row: Row) -> None:
    assert not row.failures()
    assert row.own is not None
    assert row.own.status == "equal"
    assert row.paged is not None
    if not row.path.startswith(REFUSED):
        assert row.paged.status == "equal"


@pytest.mark.parametrize("name", PATHS)
def test_a_type_answers_as_with_dynamic_cache(name):
    if name not in type_names():
        pytest.skip(f"this version of transformers has no {name}")
    row = check_type(name)
    assert row.runs, row.baseline
    _check(row)
    assert row.path == PATHS[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_answers_as_with_dynamic_cache(name):
    from hf_fp8kv import FP8PagedCache

    model, inputs = tiny(name)
    if model.config.is_encoder_decoder:
        pytest.skip("a pair of caches, which the test of its type makes")
    want = baseline(model, inputs)
    got = answer(model, inputs, FP8PagedCache(model.config, dtype="auto", page_size=16))
    assert compare(want, got).status == "equal"
    if model._can_set_attn_implementation():
        model.set_attn_implementation("fp8_paged")
        got = answer(model, inputs, FP8PagedCache(model.config, dtype="auto", page_size=16))
        assert compare(want, got).status == "equal"


@pytest.mark.parametrize("name", ["afmoe", "moshi", "phimoe"])
def test_a_prompt_that_is_read_from_pages(name):
    """Prompts longer than the window, of models that say little of it."""
    from hf_fp8kv import FP8PagedCache

    model, inputs = build(name, attn_implementation="fp8_paged")
    want = answer(model, inputs, DynamicCache(config=model.config))
    cache = FP8PagedCache(model.config, dtype="auto", prefill="stored", page_size=16)
    assert compare(want, answer(model, inputs, cache)).status == "equal"


class _Forgetful(DynamicCache):
    """In a decoding step, the keys and values of the token before are zero."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **kw: Any):
        key, value = super().update(key_states, value_states, layer_idx, *rest, **kw)
        if key_states.shape[2] == 1:
            key, value = key.clone(), value.clone()
            key[:, :, -2], value[:, :, -2] = 0, 0
        return key, value


@pytest.mark.parametrize("name", [name for name in PATHS if "/" not in name])
def test_one_lost_token_is_noticed(name):
    if name not in type_names():
        pytest.skip(f"this version of transformers has no {name}")
    model, inputs = build(name)
    wrong = answer(model, inputs, _Forgetful(config=model.config))
    assert compare(baseline(model, inputs), wrong).status != "equal"


@pytest.mark.parametrize("attention", ["sdpa", "fp8_paged"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3n_text", "qwen3_next", "bart"])
def test_heads_in_the_wrong_order_are_noticed(name, attention):
    from hf_fp8kv import FP8PagedCache

    class Confused(FP8PagedCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **kw: Any):
            if key_states.shape[2] == 1:
                value_states = value_states.roll(1, dims=1)
            return super().update(key_states, value_states, layer_idx, *rest, **kw)

    model, inputs = build(name)
    want = baseline(model, inputs)
    model.set_attn_implementation(attention)
    wrong = answer(model, inputs, Confused(model.config, dtype="auto"))
    assert compare(want, wrong).status != "equal"


def test_a_model_is_the_same_for_the_same_seed():
    first, second = build("gpt_oss")[0], build("gpt_oss")[0]
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.full
@pytest.mark.parametrize("name", type_names())
def test_every_type(name):
    row = check_type(name)
    if not row.runs:
        pytest.skip(row.baseline)
    _check(row)


@pytest.mark.full
def test_enough_types_run_under_dynamic_cache():
    assert counts(list(sweep(type_names(), only_baseline=True)))["run under DynamicCache"] >= 140
