"""Latent attention (MLA) under "fp8_paged": the same answers, from latents as they are stored."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import DynamicCache

from hf_fp8kv import FP8PagedCache, check_model, disable, enable
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.modeling.model_support import EXPAND, caches_latents
from hf_fp8kv.utils import warn_once
from tests.helpers.grids import pairwise
from tests.helpers.tiny_models import build, type_names
from tests.tools.sweep import Watch

pytestmark = [pytest.mark.text, pytest.mark.filterwarnings("ignore")]

# Every family of transformers that caches latents. Those in the middle have an indexer or windows.
FAMILIES = [
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "longcat_flash",
    "mistral4", "deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text", "mistral_large4",
    "glm5_next", "kimi_linear", "bailing_hybrid",
]  # fmt: skip
# With seed 0 the indexers of these find keys equal, and which of them they choose depends on the
# size of the cache.
SEEDS = {"mistral_large4": 1, "dots3_note_text": 2}
# Bounds relative to the size of the results: of one attention in fp32, which is ten times the error
# of 600 tokens, and of the logits of models, since a few layers add to the error.
CLOSE_ATTENTION, CLOSE = 1e-5, 1e-4
NEW = 10
MODELS: dict[str, Any] = {}


def model_of(name: str) -> Any:
    """A new copy of the family's model and its inputs, padded on the left."""
    if name not in type_names():
        pytest.skip(f"this version of transformers has no {name}")
    if name not in MODELS:
        MODELS[name] = build(name, SEEDS.get(name, 0))
    return copy.deepcopy(MODELS[name])


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(type(module), EXPAND)]


def latents(model: Any) -> int:
    """The number of layers that cache latents. Older sparse attention caches dense K and V."""
    return len(attentions(model)) if caches_latents(model.config.get_text_config()) else 0


@pytest.fixture
def watch() -> Iterator[Watch]:
    """What each call of the attention "fp8_paged" reads in a decoding step."""
    watch = Watch()
    with watch():
        yield watch


def answer(model: Any, inputs: Any, cache: Any, **options: Any) -> tuple[Any, Any]:
    """Tokens, and the logits that chose them."""
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    extra = {"output_logits": True, "return_dict_in_generate": True}
    out = model.generate(**inputs, past_key_values=cache, **options, **extra)
    return out.sequences, torch.stack(out.logits, 1)


def check_same(got: Any, want: Any) -> None:
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], atol=CLOSE * float(want[1].std()), rtol=0)


def stock(model: Any, inputs: Any, **options: Any) -> Any:
    cache = DynamicCache(config=model.config.get_text_config())
    return answer(model, inputs, cache, **options)


def paged(model: Any, **options: Any) -> FP8PagedCache:
    dtype = None if "plan" in options else "auto"
    return FP8PagedCache(model.config, dtype=dtype, page_size=8, **options)


# Plain, with windows, with an indexer, with layers that read another layer's latents or have no
# positions.
SOME = ["deepseek_v3", "dots3_note_text", "glm_moe_dsa", "mistral_large4"]
FULL = [pytest.param(x, marks=pytest.mark.full) for x in FAMILIES if x not in SOME]


@pytest.mark.parametrize("name", [*SOME, *FULL])
def test_every_family(name: str, watch: Watch) -> None:
    model, inputs = model_of(name)
    want = stock(model, inputs)
    model.set_attn_implementation("fp8_paged")
    for options in ({}, {"max_cache_len": 30}, {"prefill": "stored"}):
        watch.seen.clear()
        check_same(answer(model, inputs, paged(model, **options)), want)
        # Every layer that caches latents, in every step.
        assert watch.seen["fused, latent"] == latents(model) * (NEW - 1)


# Static scales; searched and rotated formats; K unquantized.
EIGHT_BITS: list[dict[str, Any]] = [
    {"scales": 0.01, "value_dtype": "fp8_e4m3"},
    {"plan": ("fp8_e2m5", "int8 rotated")},
    {"dtype": "auto", "value_dtype": "fp8_e4m3", "max_cache_len": 30},
]


# Grid: every pair of a model, a storage plan and a backend.
@pytest.mark.parametrize(
    ("name", "options", "backend"),
    pairwise(["mistral_large4", "glm5_next"], EIGHT_BITS, ["torch", "cpu"]),
    ids=str,
)
def test_layers_without_positions(name: str, options: dict[str, Any], backend: str) -> None:
    """The format of positions matters to the layers that have positions only."""
    model, inputs = model_of(name)
    model.set_attn_implementation("fp8_paged")
    cache = FP8PagedCache(model.config, page_size=8, backend=backend, **options)
    logits = answer(model, inputs, cache)[1]
    assert cache.layers[1].values.shape[-1] == 0
    reference = FP8PagedCache(model.config, page_size=8, backend="reference", **options)
    want = answer(model, inputs, reference)[1]
    torch.testing.assert_close(logits, want, atol=CLOSE * float(want.std()), rtol=0)
    assert torch.equal(copy.deepcopy(cache).layers[1].keys, cache.layers[1].keys)


# Grid: each kind of latent attention once, half of them in a preallocated cache.
SOME_CACHES = [(name, {"max_cache_len": 40} if n % 2 else {}) for n, name in enumerate(SOME)]


@pytest.mark.parametrize(("name", "options"), SOME_CACHES, ids=str)
@torch.no_grad()
def test_chunks_crop_and_forks(name: str, options: dict[str, Any], watch: Watch) -> None:
    model, _ = model_of(name)
    model.set_attn_implementation("fp8_paged")
    ids = torch.randint(4, 90, (2, 30), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    want = model(ids, attention_mask=mask, use_cache=False).logits

    def read(cache: FP8PagedCache, start: int, stop: int) -> None:
        got = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        hidden = max(3 - start, 0)
        torch.testing.assert_close(
            got[0, hidden:], want[0, start + hidden : stop], atol=CLOSE, rtol=CLOSE
        )
        torch.testing.assert_close(got[1], want[1, start:stop], atol=CLOSE, rtol=CLOSE)

    cache = paged(model, **options)
    if name == "dots3_note_text":
        cache.activate_past_recording()
    for start, stop in ((0, 7), (7, 9), (9, 16), (16, 17), (17, 25)):
        read(cache, start, stop)
    twin = cache.fork()
    cache.crop(-9)
    watch.seen.clear()
    read(cache, 16, 18)
    read(twin, 25, 26)
    read(cache, 18, 19)
    assert watch.seen["fused, latent"] == 2 * latents(model)


@pytest.mark.parametrize(("name", "options"), SOME_CACHES, ids=str)
def test_beams(name: str, options: dict[str, Any], watch: Watch) -> None:
    model, inputs = model_of(name)
    want = stock(model, inputs, num_beams=3)[0]
    model.set_attn_implementation("fp8_paged")
    assert torch.equal(answer(model, inputs, paged(model, **options), num_beams=3)[0], want)
    assert bool(watch.seen["fused, latent"]) is bool(latents(model))


def test_other_attention_and_disable(watch: Watch) -> None:
    model, inputs = model_of("deepseek_v3")
    before = [set(vars(module)) for module in attentions(model)]
    want = stock(model, inputs)
    enable(model, dtype="auto")
    check_same(answer(model, inputs, None), want)
    assert watch.path() == "fused, latent"
    model.set_attn_implementation("sdpa")
    check_same(answer(model, inputs, paged(model)), want)
    disable(model)
    assert [set(vars(module)) for module in attentions(model)] == before
    check_same(answer(model, inputs, paged(model)), want)


# -- projections that are not plain layers -------------------------------------------------------


class Rounded(nn.Linear):
    """As layers of quantized weights: its weight is not what it multiplies by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight * 16).round() / 16)


class Adapted(nn.Module):
    """As PEFT's layers are: a layer, and the product of two small ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.scaling = {"default": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x)) * self.scaling["default"]


class Packed(nn.Module):
    """As layers of packed weights, which are neither parameters nor buffers."""

    def __init__(self, base: nn.Linear, factor: float = 1.0) -> None:
        super().__init__()
        self.packed = (factor * base.weight.detach(),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed[0].T


def rounded(base: nn.Linear) -> nn.Module:
    layer = Rounded(base.in_features, base.out_features, bias=False)
    layer.weight = base.weight
    return layer


def biased(base: nn.Linear) -> nn.Module:
    layer = nn.Linear(base.in_features, base.out_features)
    layer.weight = base.weight
    return layer


def hooked(base: nn.Linear, change: Any = lambda x: 0.5 * x) -> nn.Module:
    base.register_forward_hook(lambda *args: change(args[2]))
    return base


def replace_all(model: Any, change: Any) -> None:
    torch.manual_seed(0)
    for module in attentions(model):
        module.kv_b_proj = change(module.kv_b_proj).eval()


def check_answer(model: Any, inputs: Any, *, path: str = "fused, latent") -> None:
    """Assert the answer of the model's own attention, and what decoding steps read, unless ""."""
    model.set_attn_implementation("sdpa")
    want = stock(model, inputs)
    model.set_attn_implementation("fp8_paged")
    watch = Watch()
    with watch():
        check_same(answer(model, inputs, paged(model)), want)
    assert path in ("", watch.path())


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (rounded, "fused, latent"), (Adapted, "fused, latent"), (hooked, "fused, latent"),
        (biased, "dense"), (lambda base: hooked(base, torch.tanh), "dense"),
    ],
)  # fmt: skip
def test_projections_of_other_kinds(change: Any, path: str) -> None:
    """A projection that does more than multiply by a weight is applied to the whole history."""
    model, inputs = build("deepseek_v3")
    replace_all(model, change)
    check_answer(model, inputs, path=path)
    report = check_model(model)
    assert report.path == path
    assert ("more than a product with weights" in str(report)) is (path == "dense")


def test_weights_that_change() -> None:
    model, inputs = build("deepseek_v3")
    check_answer(model, inputs)
    first = attentions(model)[0]
    with torch.no_grad():
        first.kv_b_proj.weight.mul_(-1)
    check_answer(model, inputs)
    replace_all(model, Adapted)
    check_answer(model, inputs)
    with torch.no_grad():
        first.kv_b_proj.down.weight.mul_(-3)
    check_answer(model, inputs)
    first.kv_b_proj.scaling["default"] = 5.0
    check_answer(model, inputs)
    first.kv_b_proj.up.weight = nn.Parameter(first.kv_b_proj.up.weight.detach().flip(0))
    check_answer(model, inputs)
    # Hooks one after the other: the second may be where the first one was.
    for change in (lambda x: 0.5 * x, lambda x: x + 1):
        handle = first.kv_b_proj.register_forward_hook(lambda *args, f=change: f(args[2]))
        check_answer(model, inputs)
        handle.remove()
    # Projections that replace each other and have no parameters.
    plain = [module.kv_b_proj.base_layer for module in attentions(model)]
    for factor in (1.0, -2.0):
        for module, base in zip(attentions(model), plain, strict=True):
            module.kv_b_proj = Packed(base, factor).eval()
        check_answer(model, inputs)


def test_an_adapter_for_each_text() -> None:
    """PEFT's `adapter_names`: a hook of each call chooses adapters, so no one weight is right."""
    model, inputs = build("deepseek_v3")
    replace_all(model, Adapted)
    factors = torch.tensor([1.0, -4.0]).view(2, 1, 1, 1)

    class Chosen(Adapted):
        def forward(self, x: torch.Tensor, factors: Any = 1.0) -> torch.Tensor:
            return self.base_layer(x) + self.up(self.down(x)) * factors

    def choose(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "factors": factors}

    for module in attentions(model):
        module.kv_b_proj.__class__ = Chosen
    check_answer(model, inputs)
    hooks = [
        module.kv_b_proj.register_forward_pre_hook(choose, with_kwargs=True)
        for module in attentions(model)
    ]
    check_answer(model, inputs, path="")
    for hook in hooks:
        hook.remove()
    check_answer(model, inputs)


@pytest.mark.parametrize("change", [None, Adapted])
def test_copies_and_the_end_of_a_model(change: Any) -> None:
    """A model without references is freed at once, before the garbage collector runs."""
    model, inputs = build("deepseek_v3")
    if change is not None:
        replace_all(model, change)
    check_answer(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in attentions(twin)[0].kv_b_proj.parameters():
                parameter.mul_(-2)
        check_answer(twin, inputs)
    check_answer(model, inputs)
    weights = [weakref.ref(weight) for weight in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


# -- numbers -------------------------------------------------------------------------------------


# With more than 16 heads, products in 16 bits are computed for some heads at a time.
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 37), (torch.float16, 4)])
@torch.no_grad()
def test_autocast(dtype: torch.dtype, heads: int, watch: Watch) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
    model, inputs = build("deepseek_v3", **sizes)
    after = torch.tensor([[5], [9]])
    want = model(torch.cat([inputs["input_ids"], after], 1), use_cache=False).logits[1, -1]
    model.set_attn_implementation("fp8_paged")
    cache = paged(model)
    with torch.autocast("cpu", dtype):
        model(inputs["input_ids"], past_key_values=cache)
        got = model(after, past_key_values=cache).logits[1, -1]
    assert got.dtype == dtype
    assert watch.path() == "fused, latent"
    gap = float((got - want).abs().max() / want.std())
    assert gap < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("only_projection", [False, True])
def test_gradients(only_projection: bool) -> None:
    """A gradient expands latents, also after a step without one.

    The queries of the first layer have no gradient if an adapter trains `kv_b_proj` only.
    """
    layers = 1 if only_projection else 2
    model, inputs = build("deepseek_v3", num_hidden_layers=layers)
    if only_projection:
        model.requires_grad_(False)
        attentions(model)[0].kv_b_proj.weight.requires_grad_()
    trained = (".kv_b_proj.",) if only_projection else (".1.self_attn.q", ".1.self_attn.kv_b")
    names = [name for name, _ in model.named_parameters() if any(x in name for x in trained)]

    def gradients(cache: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
        model(torch.tensor([[5], [9]]), past_key_values=cache).logits.square().sum().backward()
        return [model.get_parameter(name).grad for name in names]

    want = gradients(DynamicCache(config=model.config))
    assert len(want) > 0
    model.set_attn_implementation("fp8_paged")
    for _ in range(2):
        for got, expected in zip(gradients(paged(model)), want, strict=True):
            torch.testing.assert_close(got, expected)
        answer(model, inputs, paged(model))


def test_training_through_stored_latents_is_refused() -> None:
    """Stored latents have no gradient, so half of the gradient would be lost."""
    model, inputs = build("deepseek_v3", attn_implementation="fp8_paged")
    model.train()
    cache, step = paged(model), torch.tensor([[5], [9]])
    loss = model(**inputs, past_key_values=cache).logits.square().sum()
    loss.backward()
    with pytest.raises(ConfigError, match=r"call model.eval\(\)"):
        model(step, past_key_values=cache)
    with torch.no_grad():
        model(step, past_key_values=cache)


def test_a_warning_says_why_latents_are_expanded(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("deepseek_v3", attn_implementation="fp8_paged")
    step = torch.tensor([[5], [9]])

    def reasons(**options: Any) -> str:
        monkeypatch.setattr(warn_once, "_WARNED", set())
        caplog.clear()
        cache = paged(model, **options)
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            model(step, past_key_values=cache)
        return caplog.text

    assert "latents" not in reasons()
    assert "they have a center" in reasons(plan=("fp8 centered", "auto"))
    with torch.autocast("cpu", torch.bfloat16):
        assert "latents" not in reasons()
    replace_all(model, biased)
    assert "not a product with weights" in reasons()
    model.requires_grad_()
    cache = paged(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    model(step, past_key_values=cache)
    assert "gradients are enabled" in caplog.text


RANK, POSITIONS, HEAD = 16, 8, 8


class Step:
    """One layer with `length` stored tokens, and the attention of `tokens` queries to them."""

    def __init__(self, length: int, tokens: int, **options: Any) -> None:
        name = "deepseek_v3"
        model = build(
            name, v_head_dim=HEAD, qk_nope_head_dim=HEAD, attn_implementation="fp8_paged"
        )[0]
        generator = torch.Generator().manual_seed(length)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        cache = FP8PagedCache(model.config, page_size=8, **options)
        stored_pair = draw(2, 1, length, RANK), 3 * draw(2, 1, length, POSITIONS)
        cache.update(*(x[:, :, :-tokens] for x in stored_pair), 0)
        handles = cache.update(*(x[:, :, -tokens:] for x in stored_pair), 0)
        enable(model)
        self.module = attentions(model)[0]
        self.query = draw(2, 4, tokens, HEAD + POSITIONS)
        self.key, self.value = self.module.expand_kv(*handles)
        self.stored = [handle.dense().double() for handle in handles]
        self.scaling = 0.3

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            out, _ = fp8_paged_attention(
                self.module, self.query, self.key, self.value, None, scaling=self.scaling
            )
        return out.double()

    def exact(self) -> torch.Tensor:
        """The result in fp64 from expanded K and V."""
        latents, positions = self.stored
        n, tokens = latents.shape[2], self.query.shape[2]
        weight = self.module.kv_b_proj.weight.double().view(4, 2 * HEAD, RANK)
        key, value = torch.einsum("hnr,bxjr->bhjn", weight, latents).split(HEAD, -1)
        key = torch.cat([key, positions.expand(-1, 4, -1, -1)], -1)
        logits = self.scaling * self.query.double() @ key.mT
        seen = torch.ones(tokens, n, dtype=torch.bool).tril(n - tokens)
        return (logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


# Grid: every pair of lengths around a page, a format and a backend.
@pytest.mark.parametrize(
    ("lengths", "dtype", "backend"),
    pairwise(
        [(7, 1), (8, 1), (9, 1), (41, 1), (40, 3), (600, 2)],
        ["auto", "fp8_e4m3"],
        ["reference", "torch", "cpu"],
    ),
    ids=str,
)
def test_the_error_is_that_of_fp32(lengths: tuple[int, int], dtype: str, backend: str) -> None:
    step = Step(*lengths, dtype=dtype, value_dtype=dtype, backend=backend)
    want = step.exact()
    got, bound = step.run(), CLOSE_ATTENTION * want.abs().max()
    assert (got - want).abs().max() <= bound
    # The bound is tight: each of these changes of the stored numbers exceeds it.
    latents, positions = step.stored
    last_page = latents.shape[2] - 1 - (latents.shape[2] - 1) % 8
    wrong = {
        "a token lost": [latents[:, :, 1:], positions[:, :, 1:]],
        "positions doubled": [latents, positions * 2],
        "latents doubled": [latents * 2, positions],
        "two tokens swapped": [latents.roll(1, 2), positions],
    }
    if last_page:
        wrong["last page zero"] = [latents.clone(), positions]
        wrong["last page zero"][0][:, :, last_page:] = 0
    for fault, stored in wrong.items():
        step.stored = stored
        assert (got - step.exact()).abs().max() > bound, fault


# -- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompt", "change"),
    [
        ("deepseek_v3", "enabled", rounded), ("deepseek_v3", "compiled", None),
        pytest.param("deepseek_v3", "enabled", None, marks=pytest.mark.full),
        pytest.param("deepseek_v32", "eager", None, marks=pytest.mark.full),
    ],
)  # fmt: skip
@torch.no_grad()
def test_compiled(name: str, prompt: str, change: Any) -> None:
    """The prompt runs eagerly, is compiled after `enable`, or is compiled before anything else."""
    torch._dynamo.reset()
    counters.clear()
    layers = {"num_hidden_layers": 1} if name == "deepseek_v3" else {}
    model, inputs = build(name, attn_implementation="fp8_paged", **layers)
    if change is not None:
        replace_all(model, change)
    ids, extra = inputs["input_ids"], torch.tensor([[5, 6, 7], [9, 8, 7]])
    if prompt == "enabled":
        enable(model)
    widths: list[list[int]] = []

    def note_widths(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        reads = [node for node in graph.graph.nodes if ".attend" in str(node.target)]
        widths.append([node.args[0].meta["example_value"].shape[-1] for node in reads])
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=note_widths)
    cache = paged(model, max_cache_len=24)
    (model if prompt == "eager" else compiled)(ids, past_key_values=cache)
    got = [compiled(extra[:, :1], past_key_values=cache).logits]
    # Between two steps, change in place weights that no stored number depends on: the last layer's
    # values.
    last = attentions(model)[-1].kv_b_proj
    last.weight.unflatten(0, (4, 24))[:, 8:] *= -3
    got.append(compiled(extra[:, 1:2], past_key_values=cache).logits)
    texts = [torch.cat([ids, extra[:, :n]], 1) for n in (1, 2)]
    want = [model(texts[1], use_cache=False).logits[:, -1:]]
    last.weight.unflatten(0, (4, 24))[:, 8:] /= -3
    want.insert(0, model(texts[0], use_cache=False).logits[:, -1:])
    torch.testing.assert_close(got, want, atol=CLOSE, rtol=CLOSE)
    assert not counters["graph_break"]
    assert len(widths) == (1 if prompt == "eager" else 2)
    # Queries of latents and positions. A model that is compiled first is expanded.
    assert set(widths[-1]) == (set() if prompt == "compiled" else {RANK + POSITIONS})
