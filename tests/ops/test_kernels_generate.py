"""Tests of generate() with Triton's kernels: equal tokens, and the launches of a step.

The tests run on a GPU if there is one, otherwise in Triton's interpreter.
"""

import dataclasses
import inspect
import os
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache, ops
from tests.helpers.assertions import assert_same
from tests.helpers.planned import make_centered_scales
from tests.helpers.tiny_models import build_variant

if ops.explain_backends()["triton"] is not None:
    pytest.skip(str(ops.explain_backends()["triton"]), allow_module_level=True)

from hf_fp8kv.ops.triton.target import assuming, get_target, recording
from tests.ops.test_kernels_attention import list_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = [
    pytest.mark.text,
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


def make_model(name: str) -> tuple[Any, dict[str, Any]]:
    model, inputs = build_variant(name, attn_implementation="fp8_paged")
    return model.to(DEVICE), {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def generate_tokens(
    model: Any, inputs: dict[str, Any], backend: str, cache_options: Any = None, **options: Any
) -> Any:
    cache = FP8PagedCache(model.config, page_size=16, backend=backend, **(cache_options or {}))
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **options})


PREALLOCATED = {"max_cache_len": 40}
CENTERED = {"scales": make_centered_scales()}


# All architectures but sinks run with a growing and a preallocated cache, each format with either.
@pytest.mark.parametrize(
    ("name", "cache_options"),
    [
        ("gqa", {}), ("gqa", {"dtype": "fp8_e3m4", "prefill": "stored"}),
        ("gqa", {**PREALLOCATED, **CENTERED}), ("kv_sharing", PREALLOCATED),
        pytest.param("kv_sharing", CENTERED, marks=pytest.mark.full),
        ("sliding_and_full", {"key_dtype": "auto", "value_dtype": "fp8_e5m2"}),
        ("sliding_and_full", PREALLOCATED), ("latent", {}), ("latent", PREALLOCATED), ("sinks", {}),
    ],
    ids=str,
)  # fmt: skip
def test_several_architectures_give_equal_tokens(name, cache_options):
    model, inputs = make_model(name)
    expected = generate_tokens(model, inputs, "torch", cache_options)
    assert_same(generate_tokens(model, inputs, "triton", cache_options), expected)


@pytest.mark.parametrize(
    ("cache_options", "num_tokens"), [({}, 1), ({}, 40), ({"max_cache_len": 80}, 40)], ids=str
)
@torch.no_grad()
def test_a_step_or_a_later_prompt_has_two_launches_per_layer(cache_options, num_tokens):
    """The schedule is one additional launch for all layers."""
    model, inputs = make_model("gqa")
    cache = FP8PagedCache(model.config, page_size=16, backend="triton", **cache_options)
    # With two query heads per KV head, 40 tokens have 80 rows.
    ids = inputs["input_ids"].repeat(1, 4)[:1, :40]
    model(ids[:, :8], past_key_values=cache)
    with recording(dry_run=True) as recorded:
        model(ids[:, :num_tokens], past_key_values=cache)
    names = list_kernels(recorded)
    num_layers = model.config.num_hidden_layers
    layer_kernels = [name for name in names if name != "_fill_schedule"]
    assert layer_kernels == ["_write", "_attend"] * num_layers
    assert num_tokens > 1 or names.count("_fill_schedule") == 1


@pytest.mark.parametrize(("options", "num_tokens"), [({}, 1), ({}, 2), (PREALLOCATED, 1)], ids=str)
def test_layers_use_the_schedule_of_their_query_rows(options, num_tokens):
    """With 16 rows, fewer programs fit on an SM. Layers would replace a schedule for more programs.

    The model is in bfloat16. For float32 operands, a GPU reports how many programs fit.
    """
    model, inputs = build_variant(
        "gqa", attn_implementation="fp8_paged", num_attention_heads=16 // num_tokens,
        num_key_value_heads=1,
    )  # fmt: skip
    model.to(DEVICE, torch.bfloat16)
    ids = inputs["input_ids"].to(DEVICE)
    cache = FP8PagedCache(model.config, page_size=16, backend="triton", **options)
    # Without a cost, sequences of any length are split.
    target = dataclasses.replace(get_target(DEVICE), parameters={"split_cost": 0})
    with torch.no_grad(), assuming(target):
        model(ids, past_key_values=cache)
        with recording(dry_run=True) as recorded:
            model(ids[:, :num_tokens], past_key_values=cache)
    assert list_kernels(recorded).count("_fill_schedule") == 1
    assert list_kernels(recorded).count("_attend") == model.config.num_hidden_layers


@torch.no_grad()
def test_keys_take_few_hops_to_the_kernel(monkeypatch):
    """In first and later calls, at most eight functions in six files receive the keys."""
    cache = FP8PagedCache(make_model("gqa")[0].config, backend="triton")
    stacks = []

    def record_launch(kernel: Any, *_: Any, **_constants: Any) -> None:
        stacks.append(
            [frame for frame in inspect.stack() if f"{os.sep}hf_fp8kv{os.sep}" in frame.filename]
        )
        assert kernel.__name__ == "_write"

    monkeypatch.setattr("hf_fp8kv.ops.triton.write.launch", record_launch)
    for num_tokens in (40, 1, 2):
        cache.update(*torch.randn(2, 1, 2, num_tokens, 16), 0)
    for stack in stacks:
        names = [frame.function for frame in stack][::-1]
        assert len([*names, "launch", "_write"]) <= 8, names
        assert len({*[frame.filename for frame in stack], "target.py"}) <= 6
    assert len(stacks) == 3
