"""Tests of gradients with `enable(model, training="stored")`, which pass rounding unchanged."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hf_fp8kv import FP8PagedCache, disable, enable
from tests.helpers.tiny_models import build_variant
from tests.reproducible.test_training import (
    PAGE_SIZE,
    assert_near,
    make_scales,
    make_texts,
    score_texts,
)

Tensor = torch.Tensor


def compute_rounding_errors(
    config: Any, layer_index: int, key: Tensor, value: Tensor, **options: Any
) -> Any:
    """Return the errors of K and V after a layer's pages have stored them."""
    cache = FP8PagedCache(config, prefill="stored", page_size=PAGE_SIZE, **options)
    k, v = key.detach(), value.detach()
    stored_k, stored_v = cache.update(k, v, layer_index)
    return stored_k.dense().to(k) - k, stored_v.dense().to(v) - v


@pytest.fixture
def add_errors() -> Iterator[Callable[..., None]]:
    """Return a function that makes a model add rounding errors to K and V in eager attention.

    The errors are constants, so gradients of autograd pass them unchanged, even if K and V
    saturate.
    """

    def switch_attention(model: Any, **options: Any) -> None:
        def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            k_error, v_error = compute_rounding_errors(
                model.config, module.layer_idx, key, value, **options
            )
            eager = sys.modules[type(module).__module__].eager_attention_forward
            return eager(module, query, key + k_error, value + v_error, *args, **kwargs)

        AttentionInterface.register("erroneous", attend)
        AttentionMaskInterface.register("erroneous", eager_mask)
        model.set_attn_implementation("erroneous")

    yield switch_attention
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("erroneous", None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gqa", {"scales": make_scales(has_center=True)}), ("sliding", {"dtype": "int8"}),
        ("softcap", {"dtype": "fp8_e4m3"}), ("sinks", {"scales": make_scales(has_center=False)}),
        ("mha", {"dtype": "fp8_e2m5"}), ("sliding_and_full", {"dtype": "fp8_e5m2"}),
    ],
)  # fmt: skip
def test_gradients_of_a_model_match_constant_errors(
    name: str, options: dict[str, Any], add_errors: Callable[..., None]
) -> None:
    grads = []
    for switch in (add_errors, functools.partial(enable, training="stored")):
        model, _ = build_variant(name, attn_implementation="eager")
        switch(model, **options)
        log_probs = score_texts(model.train())
        log_probs[:, 7].mean().backward()
        grads.append([log_probs, *(weight.grad for weight in model.parameters())])
    for expected, actual in zip(*grads, strict=True):
        assert (expected is None) is (actual is None)
        if actual is not None:
            largest = expected.abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * largest)
            assert largest > 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    model, _ = build_variant("gqa", attn_implementation="fp8_paged")
    enable(model, training="stored", dtype="fp8_e4m3").train()
    # Older versions only have the second name, which transformers 6 removes.
    enable_checkpointing = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    grads = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            enable_checkpointing({"use_reentrant": use_reentrant})
        model.zero_grad()
        # Some trainers keep use_cache=True.
        score_texts(model, use_cache=None)[:, 7].mean().backward()
        grads.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*grads)


# torch instantiates functions with custom gradients to trace them, and warns about this.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_step_has_the_same_gradients() -> None:
    model, _ = build_variant("gqa", attn_implementation="fp8_paged", num_hidden_layers=1)
    enable(model, training="stored", scales=make_scales(has_center=True), backend="torch").train()
    grads = []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        logits = function(make_texts()[0], use_cache=False).logits
        logits.log_softmax(-1)[..., 7].mean().backward()
        grads.append([logits, *(weight.grad for weight in model.parameters())])
    assert_near(grads[1][0], grads[0][0], disable(model)(make_texts()[0], use_cache=False).logits)
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.05 * eager.abs().max().item())
