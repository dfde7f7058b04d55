"""Tests that "fp8_paged" attention to stored latents (MLA) generates the same tokens."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import DynamicCache

from hf_fp8kv import FP8PagedCache, KVScales, LayerScales, check_model, disable, enable
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.modeling.model_support import EXPAND_METHOD, caches_latents
from hf_fp8kv.utils import warn_once
from tests.helpers.tiny_models import build_model, list_types
from tests.tools.sweep import Watch

pytestmark = [pytest.mark.text, pytest.mark.filterwarnings("ignore")]

# Every model family of transformers that caches latents. Some have an indexer or windows.
FAMILIES = [
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "longcat_flash",
    "mistral4", "deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text", "mistral_large4",
    "glm5_next", "kimi_linear", "bailing_hybrid",
]  # fmt: skip
# With seed 0, the indexers of these models score several keys equally, so their choice depends on
# the size of the cache.
SEEDS = {"mistral_large4": 1, "dots3_note_text": 2}
LOGITS_TOLERANCE = 1e-4  # bound of the errors of logits
NUM_NEW_TOKENS = 10
built_models: dict[str, Any] = {}


def copy_model(name: str) -> Any:
    if name not in list_types():
        pytest.skip(f"this version of transformers has no {name}")
    if name not in built_models:
        built_models[name] = build_model(name, SEEDS.get(name, 0))
    return copy.deepcopy(built_models[name])


def find_attention_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(type(module), EXPAND_METHOD)]


def count_latent_layers(model: Any) -> int:
    """Return the number of layers that cache latents.

    Sparse attention in older versions of transformers caches dense K and V.
    """
    has_latents = caches_latents(model.config.get_text_config())
    return len(find_attention_modules(model)) if has_latents else 0


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Record the path of each call of "fp8_paged" attention in a decoding step."""
    watch = Watch()
    with watch():
        yield watch


def generate(model: Any, inputs: Any, cache: Any, **options: Any) -> tuple[Any, Any]:
    options = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False, **options}
    output = model.generate(
        **inputs, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **options
    )
    return output.sequences, torch.stack(output.logits, 1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=LOGITS_TOLERANCE, rtol=LOGITS_TOLERANCE)


def assert_same_outputs(actual: Any, expected: Any) -> None:
    assert torch.equal(actual[0], expected[0])
    tolerance = LOGITS_TOLERANCE * float(expected[1].std())
    torch.testing.assert_close(actual[1], expected[1], atol=tolerance, rtol=0)


def generate_stock(model: Any, inputs: Any, **options: Any) -> Any:
    return generate(model, inputs, DynamicCache(config=model.config.get_text_config()), **options)


def make_cache(model: Any, **options: Any) -> FP8PagedCache:
    dtype = None if options.keys() & {"plan", "scales"} else "auto"
    return FP8PagedCache(model.config, dtype=dtype, page_size=8, **options)


# One family of each kind: plain, with windows, with an indexer, and with layers that read
# the latents of another layer or have no RoPE part.
FAST_FAMILIES = ["deepseek_v3", "dots3_note_text", "glm_moe_dsa", "mistral_large4"]


@pytest.mark.parametrize(
    "name",
    [
        family if family in FAST_FAMILIES else pytest.param(family, marks=pytest.mark.full)
        for family in FAMILIES
    ],
)
def test_all_families_give_the_same_tokens(name: str, watch: Watch) -> None:
    model, inputs = copy_model(name)
    expected = generate_stock(model, inputs)
    model.set_attn_implementation("fp8_paged")
    for options in ({}, {"max_cache_len": 30}, {"prefill": "stored", "backend": "torch"}):
        watch.path_counts.clear()
        assert_same_outputs(generate(model, inputs, make_cache(model, **options)), expected)
        # All layers that cache latents use them in all steps.
        num_reads = count_latent_layers(model) * (NUM_NEW_TOKENS - 1)
        assert watch.path_counts["fused, latent"] == num_reads


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in FAST_FAMILIES[::2]),
        *((name, {"max_cache_len": 40}) for name in FAST_FAMILIES[1::2]),
    ],
    ids=str,
)
@torch.no_grad()
def test_chunks_crops_and_forks_keep_logits(name: str, options: dict, watch: Watch) -> None:
    model, _ = copy_model(name)
    model.set_attn_implementation("fp8_paged")
    ids = torch.randint(4, 90, (2, 30), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits

    def check_chunk(cache: FP8PagedCache, start: int, stop: int) -> None:
        output = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        is_token = mask[:, start:stop].bool()
        assert_close(output.logits[is_token], expected[:, start:stop][is_token])

    cache = make_cache(model, **options)
    if name == "dots3_note_text":
        cache.activate_past_recording()
    for start, stop in ((0, 7), (7, 9), (9, 16), (16, 17), (17, 25)):
        check_chunk(cache, start, stop)
    fork = cache.fork()
    cache.crop(-9)
    watch.path_counts.clear()
    check_chunk(cache, 16, 18)
    check_chunk(fork, 25, 26)
    check_chunk(cache, 18, 19)
    assert watch.path_counts["fused, latent"] == 2 * count_latent_layers(model)


def test_other_attention_and_disable_give_the_same_tokens(watch: Watch) -> None:
    model, inputs = copy_model("deepseek_v3")
    old_attributes = [set(vars(module)) for module in find_attention_modules(model)]
    expected = generate_stock(model, inputs)
    enable(model, dtype="auto")
    assert_same_outputs(generate(model, inputs, None), expected)
    assert watch.list_paths() == "fused, latent"
    model.set_attn_implementation("sdpa")
    assert_same_outputs(generate(model, inputs, make_cache(model)), expected)
    disable(model)
    assert [set(vars(module)) for module in find_attention_modules(model)] == old_attributes
    assert_same_outputs(generate(model, inputs, make_cache(model)), expected)


class AdapterLinear(nn.Module):
    """A stand-in for PEFT's layers, which add the product of two small layers to a layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)
        self.scaling = {"default": 1.0}

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base_layer(states) + self.up(self.down(states)) * self.scaling["default"]


class PackedLinear(nn.Module):
    """A stand-in for layers with packed weights, which are neither parameters nor buffers."""

    def __init__(self, linear: nn.Linear, factor: float = 1.0) -> None:
        super().__init__()
        self.packed = (factor * linear.weight.detach(),)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.packed[0].T


def make_biased(linear: nn.Linear) -> nn.Module:
    layer = nn.Linear(linear.in_features, linear.out_features)
    layer.weight = linear.weight
    return layer


def make_hooked(linear: nn.Linear, change: Any = lambda output: 0.5 * output) -> nn.Module:
    linear.register_forward_hook(lambda _module, _args, output: change(output))
    return linear


def replace_projections(model: Any, make_projection: Any) -> None:
    torch.manual_seed(0)
    for module in find_attention_modules(model):
        module.kv_b_proj = make_projection(module.kv_b_proj).eval()


def assert_same_as_sdpa(model: Any, inputs: Any, *, path: str | None = "fused, latent") -> None:
    """Assert the same tokens as with sdpa, and the path of decoding steps. None skips the path."""
    model.set_attn_implementation("sdpa")
    expected = generate_stock(model, inputs)
    model.set_attn_implementation("fp8_paged")
    watch = Watch()
    with watch():
        assert_same_outputs(generate(model, inputs, make_cache(model)), expected)
    assert path in (None, watch.list_paths())


@pytest.mark.parametrize(
    ("make_projection", "path"),
    [
        (PackedLinear, "fused, latent"), (AdapterLinear, "fused, latent"),
        (make_hooked, "fused, latent"), (make_biased, "dense"),
        (lambda linear: make_hooked(linear, torch.tanh), "dense"),
    ],
)  # fmt: skip
def test_projections_of_any_kind_are_applied(make_projection: Any, path: str) -> None:
    """A projection that does more than multiply by a weight is applied to all stored tokens."""
    model, inputs = build_model("deepseek_v3")
    replace_projections(model, make_projection)
    assert_same_as_sdpa(model, inputs, path=path)
    report = check_model(model)
    assert report.path == path
    assert ("more than a multiplication by weights" in str(report)) is (path == "dense")


@torch.no_grad()
def test_changed_weights_take_effect() -> None:
    model, inputs = build_model("deepseek_v3")
    assert_same_as_sdpa(model, inputs)
    first_module = find_attention_modules(model)[0]
    changes: tuple[Callable[[], Any], ...] = (
        lambda: first_module.kv_b_proj.weight.mul_(-1),
        lambda: replace_projections(model, AdapterLinear),
        lambda: first_module.kv_b_proj.down.weight.mul_(-3),
        lambda: first_module.kv_b_proj.scaling.update(default=5.0),
        lambda: first_module.kv_b_proj.up.register_parameter(
            "weight", nn.Parameter(first_module.kv_b_proj.up.weight.flip(0))
        ),
    )
    for change_projection in changes:
        change_projection()
        assert_same_as_sdpa(model, inputs)
    # The second of two successive hooks may have the address of the first.
    projection = first_module.kv_b_proj
    for factor in (0.5, -3.0):
        hook = projection.register_forward_hook(
            lambda _module, _args, output, factor=factor: factor * output
        )
        assert_same_as_sdpa(model, inputs)
        hook.remove()
    # Two successive projections have no parameters.
    linears = [module.kv_b_proj.base_layer for module in find_attention_modules(model)]
    for factor in (1.0, -2.0):
        for module, linear in zip(find_attention_modules(model), linears, strict=True):
            module.kv_b_proj = PackedLinear(linear, factor).eval()
        assert_same_as_sdpa(model, inputs)


def test_adapters_may_differ_by_sequence() -> None:
    """With PEFT's `adapter_names`, adapters differ by sequence, so no single weight is correct."""
    model, inputs = build_model("deepseek_v3")
    replace_projections(model, AdapterLinear)
    factors = torch.tensor([1.0, -4.0]).view(2, 1, 1, 1)

    class AdapterPerSequence(AdapterLinear):
        def forward(self, states: torch.Tensor, factors: Any = 1.0) -> torch.Tensor:
            return self.base_layer(states) + self.up(self.down(states)) * factors

    projections = [module.kv_b_proj for module in find_attention_modules(model)]
    for projection in projections:
        projection.__class__ = AdapterPerSequence
    assert_same_as_sdpa(model, inputs)
    hooks = [
        projection.register_forward_pre_hook(
            lambda _module, args, kwargs: (args, {**kwargs, "factors": factors}), with_kwargs=True
        )
        for projection in projections
    ]
    assert_same_as_sdpa(model, inputs, path=None)
    for hook in hooks:
        hook.remove()
    assert_same_as_sdpa(model, inputs)


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("make_projection", [None, AdapterLinear])
def test_copies_have_their_weights_and_a_deleted_model_is_freed(make_projection: Any) -> None:
    """A model without references is freed at once, before the garbage collector runs."""
    model, inputs = build_model("deepseek_v3")
    if make_projection is not None:
        replace_projections(model, make_projection)
    assert_same_as_sdpa(model, inputs)
    for model_copy in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in find_attention_modules(model_copy)[0].kv_b_proj.parameters():
                parameter.mul_(-2)
        assert_same_as_sdpa(model_copy, inputs)
    assert_same_as_sdpa(model, inputs)
    references = [weakref.ref(weight) for weight in model.parameters()]
    gc.collect()
    del model
    assert all(reference() is None for reference in references)


# With more than 16 heads, products in 16 bits are computed for some heads at a time.
@pytest.mark.parametrize(("dtype", "num_heads"), [(torch.bfloat16, 37), (torch.float16, 4)])
@torch.no_grad()
def test_autocast_has_a_small_error(dtype: torch.dtype, num_heads: int, watch: Watch) -> None:
    model, inputs = build_model(
        "deepseek_v3", num_attention_heads=num_heads, num_key_value_heads=num_heads
    )
    next_ids = torch.tensor([[5], [9]])
    expected = model(torch.cat([inputs["input_ids"], next_ids], 1), use_cache=False).logits[1, -1]
    model.set_attn_implementation("fp8_paged")
    cache = make_cache(model)
    with torch.autocast("cpu", dtype):
        model(inputs["input_ids"], past_key_values=cache)
        actual = model(next_ids, past_key_values=cache).logits[1, -1]
    assert actual.dtype == dtype
    assert watch.list_paths() == "fused, latent"
    error = float((actual - expected).abs().max() / expected.std())
    assert error < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("only_projection", [False, True])
def test_gradients_match_expanded_latents(only_projection: bool) -> None:
    """Latents are expanded for gradients, even after a step without gradients.

    The queries of the first layer have no gradient if an adapter trains only `kv_b_proj`.
    """
    model, inputs = build_model("deepseek_v3", num_hidden_layers=1 if only_projection else 2)
    attention = find_attention_modules(model)[-1]
    weights = [attention.kv_b_proj.weight]
    if only_projection:
        model.requires_grad_(False)
        weights[0].requires_grad_()
    else:
        parameters = dict(attention.named_parameters())
        weights += [parameters[name] for name in parameters if name.startswith("q")]

    def compute_gradients(cache: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
        model(torch.tensor([[5], [9]]), past_key_values=cache).logits.square().sum().backward()
        return [weight.grad for weight in weights]

    expected_gradients = compute_gradients(DynamicCache(config=model.config))
    model.set_attn_implementation("fp8_paged")
    for _ in range(2):
        torch.testing.assert_close(compute_gradients(make_cache(model)), expected_gradients)
        generate(model, inputs, make_cache(model))


def test_training_through_stored_latents_is_refused() -> None:
    """Stored latents have no gradient, so the gradient would be incomplete."""
    model, inputs = build_model("deepseek_v3", attn_implementation="fp8_paged")
    model.train()
    cache = make_cache(model)
    next_ids = torch.tensor([[5], [9]])
    model(**inputs, past_key_values=cache).logits.square().sum().backward()
    with pytest.raises(ConfigError, match=r"Call model.eval\(\)"):
        model(next_ids, past_key_values=cache)
    with torch.no_grad():
        model(next_ids, past_key_values=cache)


def test_a_warning_explains_expanded_latents(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_model("deepseek_v3", attn_implementation="fp8_paged")
    constant = torch.ones(())
    layer = LayerScales(constant, constant, torch.ones(1, model.config.kv_lora_rank))

    def read_warning(has_gradients: bool = False, **options: Any) -> str:
        monkeypatch.setattr(warn_once, "_logged_messages", set())
        caplog.clear()
        cache = make_cache(model, **options)
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
        with torch.set_grad_enabled(has_gradients):
            model(torch.tensor([[5], [9]]), past_key_values=cache)
        return caplog.text

    assert "latents" not in read_warning()
    with torch.autocast("cpu", torch.bfloat16):
        assert "latents" not in read_warning()
    assert "they have a center" in read_warning(scales=KVScales({0: layer, 1: layer}))
    assert "gradients are enabled" in read_warning(has_gradients=True)
    replace_projections(model, make_biased)
    assert "does more than multiply by weights" in read_warning()


@pytest.mark.parametrize(
    ("prompt_mode", "make_projection"), [("enabled", AdapterLinear), ("compiled", None)]
)
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled_steps_read_latents(prompt_mode: str, make_projection: Any) -> None:
    """The prompt is compiled after `enable`, or is compiled first."""
    model, inputs = build_model("deepseek_v3", attn_implementation="fp8_paged", num_hidden_layers=1)
    if make_projection is not None:
        replace_projections(model, make_projection)
    ids = inputs["input_ids"]
    next_ids = torch.tensor([[5, 6], [9, 8]])
    if prompt_mode == "enabled":
        enable(model, dtype="auto")
    widths: list[list[int]] = []

    def record_widths(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        attend_nodes = [node for node in graph.graph.nodes if ".attend" in str(node.target)]
        queries = [node.args[0].meta["example_value"] for node in attend_nodes]
        widths.append([query.shape[-1] for query in queries])
        return graph.forward

    reference = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend=record_widths)
    cache = make_cache(model, max_cache_len=24)
    compiled(ids, past_key_values=cache)
    # Between two steps, change the weights for values of the last layer in place. No stored value
    # depends on them. The first 8 of the 24 rows of a head belong to keys.
    value_weights = []
    for each_model in (model, reference):
        weight = next(find_attention_modules(each_model)[-1].kv_b_proj.parameters())
        value_weights.append(weight.unflatten(0, (4, 24))[:, 8:])
    for num_next in (1, 2):
        prompt = torch.cat([ids, next_ids[:, :num_next]], 1)
        actual = compiled(prompt[:, -1:], past_key_values=cache).logits
        assert_close(actual, reference(prompt, use_cache=False).logits[:, -1:])
        for weight in value_weights:
            weight *= -3
    assert not counters["graph_break"]
    assert len(widths) == 2
    # A model that is compiled first expands the latents. Other queries have 16 values for latents
    # and 8 with RoPE.
    expected_widths = set() if prompt_mode == "compiled" else {16 + 8}
    assert set(widths[-1]) == expected_widths
