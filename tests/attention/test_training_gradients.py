"""Gradients of `enable(model, training="stored")`, which pass the rounding unchanged."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hf_fp8kv import FP8PagedCache, disable, enable
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.attention.masks import fp8_paged_mask
from hf_fp8kv.ops.visibility import visible
from tests.attention.test_training import PAGE, TOKENS, assert_near, static_scales, teach, texts
from tests.helpers.tiny_models import tiny

Tensor = torch.Tensor


def rounding_noise(config: Any, layer: int, key: Tensor, value: Tensor, **options: Any) -> Any:
    """What storing K and V in the pages of a layer adds to them."""
    cache = FP8PagedCache(config, prefill="stored", page_size=PAGE, **options)
    stored = cache.update(key.detach(), value.detach(), layer)
    return [x.dense().to(key) - y.detach() for x, y in zip(stored, (key, value), strict=True)]


@pytest.fixture
def noisy() -> Iterator[Callable[..., None]]:
    """Let a model compute its eager attention with K and V plus the noise of rounding.

    The noise is constant, so autograd's gradients pass it unchanged, even where K and V saturate.
    """

    def switch(model: Any, **options: Any) -> None:
        def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kw: Any) -> Any:
            noise = rounding_noise(model.config, module.layer_idx, key, value, **options)
            eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
            return eager(module, query, key + noise[0], value + noise[1], *args, **kw)

        AttentionInterface.register("noisy", attend)
        AttentionMaskInterface.register("noisy", eager_mask)
        model.set_attn_implementation("noisy")

    yield switch
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("noisy", None)


# Grid: each kind of attention with one storage plan.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gqa", {"scales": static_scales(center=True)}), ("sliding", {"dtype": "int8"}),
        ("softcap", {"dtype": "fp8_e4m3"}), ("sinks", {"scales": static_scales(center=False)}),
    ],
)  # fmt: skip
def test_gradients_of_a_model_are_those_of_constant_noise(
    name: str, options: dict[str, Any], noisy: Callable[..., None]
) -> None:
    grads = []
    for start in (lambda m: noisy(m, **options), lambda m: enable(m, training="stored", **options)):
        model, _ = tiny(name, attn_implementation="eager")
        start(model)
        model.train()
        found = teach(model)
        found[:, 7].mean().backward()
        grads.append([found, *(weight.grad for weight in model.parameters())])
    for expected, got in zip(*grads, strict=True):
        assert (expected is None) is (got is None)
        if got is not None:
            size = expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * size)
            assert size > 0


# The model, its KV heads, and further arguments of the call of attention.
GRADIENTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gqa": ("gqa", 2, {}),
    "mha": ("mha", 4, {"scaling": 0.3}),
    "window": ("sliding", 2, {"sliding_window": 5}),
    "padding": ("gqa", 2, {"padding": 3}),
    "padding and window": ("sliding", 2, {"sliding_window": 5, "padding": 3}),
    # On the left, in float64, the model's own code has NaN where nothing is visible.
    "softcap": ("softcap", 2, {"softcap": 1.5, "padding": -3}),
    "sinks": ("sinks", 2, {"s_aux": torch.tensor([-1.0, 0.0, 1.0, 2.0]), "sliding_window": 5}),
    "bias": ("gqa", 2, {"position_bias": torch.linspace(-2, 2, 4 * TOKENS**2)}),
}


def smooth_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, call: Any) -> Tensor:
    """Attention in float64, by its definition: `[B, T, Hq, Dv]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * call.get("scaling", query.shape[3] ** -0.5)
    if "softcap" in call:
        logits = call["softcap"] * (logits / call["softcap"]).tanh()
    weights = (logits + call.get("position_bias", 0)).masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if "s_aux" in call:
        total = total + call["s_aux"].view(1, -1, 1, 1).exp()
    return (weights / total @ value).transpose(1, 2)


# Grid: each kind of attention; every second one with rotated pages, the others with static scales.
@pytest.mark.parametrize(
    ("case", "rotated"), [(case, bool(n % 2)) for n, case in enumerate(GRADIENTS)]
)
def test_gradients_of_attention_against_finite_differences(case: str, rotated: bool) -> None:
    """The finite differences of a smooth function in float64, with constant noise of rounding."""
    name, heads, extras = GRADIENTS[case]
    model, _ = tiny(name, attn_implementation="fp8_paged")
    options: dict[str, Any] = {"dtype": "int8" if rotated else "fp8_e4m3"}
    if not rotated:
        options["scales"] = static_scales(heads=heads, center=True)
    enable(model, training="stored", page_size=PAGE, **options)
    module: Any = model.double().model.layers[0].self_attn  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(3)
    query, key, value, wanted = (
        torch.randn(2, count, TOKENS, 16, generator=generator, dtype=torch.float64)
        for count in (4, heads, heads, 4)
    )
    noise = rounding_noise(model.config, 0, key, value, **options)
    call = dict(extras)
    padding, window = call.pop("padding", 0), call.get("sliding_window", 0)
    text = torch.ones(2, TOKENS, dtype=torch.bool)
    text[0, slice(padding) if padding >= 0 else slice(padding, None)] = False
    mask = fp8_paged_mask(2, TOKENS, TOKENS, attention_mask=text)
    seen = visible(torch.tensor([TOKENS]), TOKENS, 0, TOKENS, True, window)[:, None]
    seen = seen & text[:, None, None]
    wanted = wanted.transpose(1, 2) * text[..., None, None]
    inputs = {"query": query, "key": key, "value": value}
    for more in ("s_aux", "position_bias"):
        if more in call:
            inputs[more] = call.pop(more).double()
    if "s_aux" in inputs:  # the model's own code reads it from its module
        module.sinks = torch.nn.Parameter(inputs["s_aux"])
        inputs["s_aux"] = module.sinks.data
    if "position_bias" in inputs:
        inputs["position_bias"] = inputs["position_bias"].view(1, 4, TOKENS, TOKENS)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    if "s_aux" in leaves:
        leaves["s_aux"] = module.sinks
    found, _ = fp8_paged_attention(module, **leaves, attention_mask=mask, **call)
    (found * wanted).sum().backward()

    def surrogate(**changed: Tensor) -> Tensor:
        states = {**inputs, **changed}
        k, v = (states.pop(name) + x for name, x in zip(("key", "value"), noise, strict=True))
        attended = smooth_attention(states.pop("query"), k, v, seen, {**call, **states})
        return attended.nan_to_num()

    present = text[..., None, None].expand_as(found)
    torch.testing.assert_close(found[present], surrogate()[present], rtol=1e-4, atol=1e-4)
    for changed, x in inputs.items():
        gradient = leaves[changed].grad
        assert gradient is not None, changed
        assert gradient.abs().max() > 1e-2, changed
        for _ in range(3):
            step = 1e-5 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
            ends = [(surrogate(**{changed: x + s}) * wanted).sum() for s in (step, -step)]
            expected = (ends[0] - ends[1]) / 2
            error = (gradient * step).sum() - expected
            assert error.abs() < 1e-5 * gradient.norm() * step.norm(), changed


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    model, _ = tiny("gqa", attn_implementation="fp8_paged")
    enable(model, training="stored", dtype="fp8_e4m3")
    model.train()
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            # Its names in transformers 6 and 5.
            name = "activation_checkpointing_enable"
            start = getattr(model, name, None) or model.gradient_checkpointing_enable
            start({"use_reentrant": reentrant})
        model.zero_grad()
        found = teach(model, use_cache=None)  # as trainers that leave the config's use_cache=True
        found[:, 7].mean().backward()
        grads.append([weight.grad for weight in model.parameters()])
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(again, plain)


# torch traces a function with its own gradient in this way.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_step() -> None:
    model, _ = tiny("gqa", attn_implementation="fp8_paged", num_hidden_layers=1)
    enable(model, training="stored", scales=static_scales(center=True), backend="torch")
    model.train()
    grads = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        logits = run(texts()[0], use_cache=False).logits
        logits.log_softmax(-1)[..., 7].mean().backward()
        grads.append([logits, *(weight.grad for weight in model.parameters())])
    unrounded = disable(model)(texts()[0], use_cache=False).logits
    assert_near(grads[1][0], grads[0][0], unrounded)
    for plain, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=0.05, atol=0.05 * plain.abs().max().item())
