"""Tests that continuous batching over FP8 pages gives the same tokens as generate()."""

import copy
import functools
import pickle
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CompileConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, input_outputs
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from hf_fp8kv import (
    BackendError,
    ConfigError,
    FP8PagedCache,
    KVScales,
    ScaleError,
    disable,
    enable,
    serving,
)
from hf_fp8kv.attention.masks import fp8_paged_mask
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.modeling.exact_states import exact_states
from hf_fp8kv.serving.attend import StoredLayer
from hf_fp8kv.serving.engines import common, order_streams
from hf_fp8kv.serving.fp8_manager import FP8Manager
from hf_fp8kv.serving.step import EngineStep, make_decode_work
from tests.helpers.margins import compute_greedy_deficit
from tests.helpers.planned import (
    make_planned_scales,
    make_planned_scales_for,
    make_protected_plan_for,
)
from tests.helpers.serving_tools import (
    NEW_TOKENS,
    PAGE_SIZE,
    are_exact,
    draw_head_scales,
    draw_prompts,
    generate_and_enable,
    generate_batch,
    generate_each,
    generate_forked,
    make_batching_config,
    make_greedy_config,
    open_manager,
    request_answer,
    request_answers,
    run_manager,
    wait_for_results,
)
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text

FULL = pytest.mark.full

# Windows are not multiples of the page size, and shorter than most prompts.
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    # Full and sliding layers, and a softcap. Sharp attention makes the tokens depend on K.
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 1},
    "gpt_oss": {"sliding_window": 9},  # full and sliding layers, and sinks
    "qwen3": {},
}
INT8_PLAN = LayerPlan.parse("int8 rotated", "int8")


def make_model(name: str) -> Any:
    return build_variant(name, **MODEL_OPTIONS[name])[0]


@pytest.fixture
def llama() -> Iterator[Any]:
    model = make_model("llama")
    yield model
    serving.disable(model)


@pytest.fixture
def served_llama(llama: Any) -> Any:
    return serving.enable(llama)


def make_head_options(model: Any) -> dict[str, Any]:
    return {"scales": draw_head_scales(model)}


# The model, a function that makes the keywords of `serving.enable`, and whether the tokens equal
# the tokens of unquantized pages. None means that this depends on the model.
CASES: list[tuple[str, Callable[[Any], dict[str, Any]], bool | None]] = [
    ("gpt_oss", make_head_options, False),
    ("gemma2", lambda model: {"dtype": "fp8_e5m2"}, None),
    ("qwen3", lambda model: {"dtype": "auto"}, True),
    ("gemma2", lambda model: {"scales": draw_head_scales(model, center=True)}, False),
    # The scales are so coarse that a wrong plan for a layer changes the tokens.
    ("llama", lambda model: {"scales": make_planned_scales_for(model, is_coarse=True)}, False),
    ("gemma2", lambda model: {"plan": make_planned_scales_for(model, is_dynamic=True)}, None),
    # Layer 0 keeps K, or K and V, in the model's dtype. Kinds have blocks of different sizes.
    ("gemma2", lambda model: {"plan": make_protected_plan_for(model, "K")}, None),
    ("llama", lambda model: {"plan": make_protected_plan_for(model, "K and V")}, None),
    ("llama", lambda model: {**make_head_options(model), "backend": "torch"}, False),
]
SLOW_CASES = [
    ("gpt_oss", lambda model: {"plan": make_protected_plan_for(model, "V")}, None),
    ("llama", lambda model: {**make_head_options(model), "backend": "triton"}, None),
]


# -- the same tokens as generate() -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "make_options", "is_exact"),
    [*CASES, *(pytest.param(*case, marks=FULL) for case in SLOW_CASES)],
)
def test_eight_prompts_get_the_tokens_of_generate(
    name: str, make_options: Any, is_exact: bool | None
) -> None:
    model = make_model(name)
    options = make_options(model)
    # Triton's interpreter takes a minute for three prompts.
    prompt_ids = draw_prompts()[:3] if options.get("backend") == "triton" else draw_prompts()
    expected = generate_and_enable(model, prompt_ids, **options)
    for max_tokens in (256, 16):  # whole prompts, and chunks
        assert generate_batch(model, prompt_ids, max_batch_tokens=max_tokens) == expected
    serving.disable(model)
    if is_exact is not None:  # False asserts that unquantized pages give different tokens
        assert are_exact(model, prompt_ids, expected) == is_exact


def test_unquantized_bfloat16_tokens_are_greedy_within_rounding() -> None:
    model = make_model("llama").to(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    reference.set_attn_implementation("sdpa")
    serving.enable(model, dtype="auto")
    answers = generate_batch(model, draw_prompts())
    for index, (prompt, answer) in enumerate(zip(draw_prompts(), answers, strict=True)):
        assert compute_greedy_deficit(reference, prompt, answer) < 0.1
        # The answers of another prompt have a larger deficit.
        assert compute_greedy_deficit(reference, prompt, answers[(index + 1) % 8]) > 0.3


@pytest.mark.parametrize(
    "make_options",
    [
        lambda model: {"scales": draw_head_scales(model, center=True), "dtype": "fp8_e4m3"},
        lambda model: {"plan": make_protected_plan_for(model)},
    ],
)
def test_decode_steps_with_block_tables_give_the_same_tokens(
    llama: Any, make_options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The steps are eager. As in CUDA graphs, the host reads no tensors of a step.
    expected = generate_and_enable(llama, draw_prompts(), **make_options(llama))
    manager = llama.init_continuous_batching(
        make_greedy_config(), make_batching_config(max_batch_tokens=64)
    )
    manager.continuous_batching_config.max_blocks_per_request = 8
    make_work = mock.Mock(side_effect=make_decode_work)
    monkeypatch.setattr(common, "make_decode_work", make_work)
    with run_manager(manager):
        assert request_answers(manager, draw_prompts()) == expected
    # One call per step, not per layer.
    assert NEW_TOKENS / 2 < make_work.call_count < 2 * NEW_TOKENS


def test_generate_with_a_paged_cache_gives_the_same_tokens(llama: Any) -> None:
    prompt = draw_prompts()[5]
    (expected,) = generate_and_enable(llama, [prompt], scales=draw_head_scales(llama))
    output = llama.generate(
        torch.tensor([prompt]),
        cache_implementation="paged",
        generation_config=make_greedy_config(continuous_batching_config=make_batching_config()),
    )
    assert output.reshape(-1).tolist()[-NEW_TOKENS:] == expected


@pytest.mark.parametrize("sides", [None, "K and V"])
@torch.no_grad()
def test_an_engine_stores_the_same_bytes_as_a_cache(sides: str | None) -> None:
    # Each layer follows its plan. A page is one row of a block and contains K, V and scales.
    model, _ = build_variant("llama", num_hidden_layers=3, attn_implementation="fp8_paged")
    ids = torch.randint(4, 90, (1, 43), generator=torch.Generator().manual_seed(3))
    plan = (
        make_planned_scales(is_dynamic=True)
        if sides is None
        else make_protected_plan_for(model, sides)
    )
    cache = FP8PagedCache(model.config, plan=plan, page_size=8, prefill="stored")
    model(ids, past_key_values=cache)
    serving.enable(model, plan=plan)
    with open_manager(model, page_size=8) as manager:
        request_answer(manager, ids[0].tolist(), 2)
        for index, layer in enumerate(cache.layers):
            blocks = manager.batch_processor.cache.layers[index].pages.block
            for page in layer.keys.block[layer.keys.table[0, :5].long()]:
                assert (blocks == page).all(1).any(), "no page of the engine has these bytes"


# -- shared pages ----------------------------------------------------------------------------------


def test_reused_prefixes_do_not_change_tokens(llama: Any) -> None:
    prompt_ids = draw_prompts()
    expected = generate_and_enable(llama, prompt_ids, scales=draw_head_scales(llama))
    with open_manager(llama) as manager:
        # Requests run one at a time, so each can reuse the pages of the previous prompts.
        tokens = [request_answer(manager, ids) for ids in prompt_ids]
        usage = serving.read_usage(manager)
    assert tokens == expected
    assert (usage.prefix_hits, usage.prefix_tokens, usage.requests_active) == (2, 96, 0)
    # Whole pages of finished requests stay. Each request stores all tokens except the last,
    # and three requests share three pages.
    num_pages = sum((len(ids) + NEW_TOKENS - 1) // PAGE_SIZE for ids in prompt_ids)
    assert usage.tokens_held == (num_pages - 2 * (48 // PAGE_SIZE)) * PAGE_SIZE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma2", {}),
        ("llama", {"dtype": "fp8_e5m2"}),  # dynamic scales are copied
        ("gemma2", {"plan": make_protected_plan_for(make_model("gemma2"))}),
    ],
)
def test_forks_give_the_same_tokens(name: str, options: dict[str, Any]) -> None:
    model = make_model(name)
    prompt_ids = draw_prompts()[:4]
    expected = generate_and_enable(
        model, prompt_ids, **options or {"scales": draw_head_scales(model)}
    )
    assert generate_forked(model, prompt_ids, 3) == [
        answer for answer in expected for _ in range(3)
    ]


@pytest.mark.parametrize("is_protected", [False, True], ids=["static scales", "layer 0 in K"])
def test_few_pages_give_the_same_tokens(is_protected: bool) -> None:
    # The pages are enough for about two requests, so requests wait or restart.
    model = make_model("gemma2")
    prompt_ids = draw_prompts()
    options = {"plan": make_protected_plan_for(model)} if is_protected else {}
    expected = generate_and_enable(
        model, prompt_ids, **options or {"scales": draw_head_scales(model)}
    )
    assert generate_batch(model, prompt_ids, num_pages=9, max_batch_tokens=64) == expected


def count_shared_tokens(manager: Any, prompt: list[int], *args: Any, **options: Any) -> int:
    """Return how many tokens of a new request are in the engine's pages."""
    old_usage = serving.read_usage(manager)
    request_answer(manager, prompt, *args, **options)
    return int(serving.read_usage(manager).prefix_tokens - old_usage.prefix_tokens)


def is_enabled(model: Any) -> bool:
    return (
        type(model.init_continuous_batching(make_greedy_config(), make_batching_config()))
        is FP8Manager
    )


# -- managers --------------------------------------------------------------------------------------


def test_disable_restores_a_model(served_llama: Any) -> None:
    new_model = make_model("llama")
    FP8PagedCache(new_model)  # the model keeps its plan
    assert set(vars(serving.disable(served_llama))) == set(vars(new_model))
    assert not served_llama._forward_pre_hooks


@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_stock_manager_of_an_enabled_model_is_an_error(
    served_llama: Any, is_disabled: bool
) -> None:
    if is_disabled:
        serving.disable(served_llama)
    manager = ContinuousBatchingManager(served_llama, make_greedy_config(), make_batching_config())
    with run_manager(manager):
        manager.add_request([5, 6], max_new_tokens=2)
        error = manager.get_result(timeout=60).error
    assert (error is None) == is_disabled
    assert is_disabled or "model.init_continuous_batching" in error


def test_a_changed_attention_fails_the_requests_of_a_running_manager(served_llama: Any) -> None:
    stock_model = make_model("llama")
    stock_model.set_attn_implementation("sdpa")
    cases = (
        (served_llama, "paged|eager", "Do not change the attention"),
        (stock_model, "fp8_paged", "an engine with FP8 pages"),
    )
    for model, attention, message in cases:
        manager = model.init_continuous_batching(make_greedy_config(), make_batching_config())
        with run_manager(manager):
            model.set_attn_implementation(attention)
            manager.add_request([5, 6], max_new_tokens=2)
            assert message in manager.get_result(timeout=60).error


def test_a_running_manager_does_not_change_generate(llama: Any) -> None:
    llama.set_attn_implementation("fp8_paged")
    ids = torch.tensor([draw_prompts()[1], [0] * 9 + draw_prompts()[4]])
    mask = torch.ones_like(ids)
    mask[1, :9] = 0

    def run_generate() -> Any:
        return llama.generate(
            ids, attention_mask=mask, past_key_values=FP8PagedCache(llama.config, scales=0.02),
            max_new_tokens=8, do_sample=False, pad_token_id=0,
        )  # fmt: skip

    expected = run_generate()
    serving.enable(llama)
    with open_manager(llama) as manager:
        manager.add_requests(draw_prompts(), max_new_tokens=NEW_TOKENS)
        for _ in range(3):
            assert torch.equal(run_generate(), expected)


@pytest.mark.parametrize("at_once", [False, True], ids=["search", "deduplication"])
def test_prompts_with_equal_hashes_share_no_pages(
    llama: Any, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine's hash has 64 bits and no key, so equal hashes can be computed offline.
    first_prompt, second_prompt = draw_prompts()[5:7]
    prompt_ids = [first_prompt, second_prompt[::-1], [first_prompt[0] + 1, *first_prompt[1:]]]
    expected = generate_and_enable(llama, prompt_ids, scales=draw_head_scales(llama))
    monkeypatch.setattr(
        cache_allocator, "compute_block_hash", lambda parent, tokens: (parent or 0) + 1
    )
    with open_manager(llama) as manager:
        if at_once:
            tokens = request_answers(manager, prompt_ids)
        else:
            tokens = [request_answer(manager, ids) for ids in prompt_ids]
        assert serving.read_usage(manager).prefix_tokens == 0
    assert tokens == expected


def test_only_requests_with_the_same_salt_share_pages(served_llama: Any) -> None:
    options = [{}, *({"cache_salt": salt} for salt in ("a", "b", "a\0", "\ud800"))]
    with open_manager(served_llama) as manager:
        for num_shared in (0, 48):
            for keywords in options:
                assert count_shared_tokens(manager, draw_prompts()[5], **keywords) == num_shared
        for salt in ("", b"a", 1):
            with pytest.raises(ConfigError, match="cache_salt: expected a string"):
                manager.add_request(draw_prompts()[5], cache_salt=salt)


def test_salts_of_requests_in_one_step_are_kept_apart(served_llama: Any) -> None:
    prompt = draw_prompts()[5]
    with open_manager(served_llama) as manager:
        manager.add_request(prompt, cache_salt="a", max_new_tokens=2)
        manager.add_request(prompt[::-1], cache_salt="b", max_new_tokens=2)
        wait_for_results(manager, 2)
        assert count_shared_tokens(manager, prompt, cache_salt="b") == 0
        assert count_shared_tokens(manager, prompt[::-1], cache_salt="a") == 0
        assert count_shared_tokens(manager, prompt, cache_salt="a") == 48
        assert count_shared_tokens(manager, prompt[::-1], cache_salt="b") == 48


def test_forked_requests_keep_the_salt(served_llama: Any) -> None:
    prompt = draw_prompts()[5]
    with open_manager(served_llama, make_greedy_config(num_return_sequences=3)) as manager:
        manager.add_request(prompt, cache_salt="a")
        answers = list(wait_for_results(manager, 3).values())
        assert answers[0] == answers[1] == answers[2]
        manager.num_return_sequences = 1
        for salt, num_shared in ((None, 0), ("a", 80), ("b", 0)):
            num_tokens = count_shared_tokens(manager, prompt + answers[0], cache_salt=salt)
            assert num_tokens == num_shared


def test_a_persistent_manager_keeps_its_prefixes(served_llama: Any) -> None:
    answers = []
    for num_hits in range(2):
        outputs = served_llama.generate_batch(
            draw_prompts()[5:6],
            make_greedy_config(),
            continuous_batching_config=make_batching_config(),
            persistent_manager=True,
        )
        answers += [output.generated_tokens for output in outputs.values()]
        assert serving.read_usage(served_llama).prefix_hits == num_hits
    assert answers[0] == answers[1]
    serving.disable(served_llama)
    assert not hasattr(served_llama, "_cached_continuous_batching_manager")


# -- engines of transformers -----------------------------------------------------------------------


def test_disable_restores_a_persistent_manager(llama: Any) -> None:
    llama.generate_batch(
        [[5, 6]],
        make_greedy_config(),
        continuous_batching_config=make_batching_config(),
        persistent_manager=True,
    )
    original = llama._cached_continuous_batching_manager
    serving.enable(llama)
    assert not hasattr(llama, "_cached_continuous_batching_manager")
    serving.disable(llama)
    assert llama._cached_continuous_batching_manager is original
    llama.destroy_cached_continuous_batching_manager()


def test_models_can_be_copied(served_llama: Any) -> None:
    for copied in (copy.deepcopy(served_llama), pickle.loads(pickle.dumps(served_llama))):
        assert is_enabled(copied)
        serving.disable(copied)
        assert not copied._forward_pre_hooks
        assert not is_enabled(copied)
    assert is_enabled(served_llama)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "keywords", "message"),
    [
        (ConfigError, {"plan": "fp8 centered"}, "expected the center of K"),
        (BackendError, {"backend": "cuda"}, "cuda"),
        (ScaleError, {"scales": KVScales.uniform(1)}, "layer"),
        (ConfigError, {"plan": {0: INT8_PLAN}}, "none for layer 1.*not in serving"),
        (ConfigError, {"plan": dict.fromkeys(range(3), INT8_PLAN)},
         r"0 to 1, but also got \[2\]"),
    ],
)  # fmt: skip
def test_invalid_arguments_change_nothing(
    llama: Any, error: type[Exception], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        serving.enable(llama, **keywords)
    assert not is_enabled(llama)
    with pytest.raises(ConfigError, match="generate_batch"):
        serving.enable(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # The attention of this model does not receive the engine's cache.
        ("diffllama", "Packing changes its logits"),
        # These models derive positions from the cache length, or positions do not begin at 0.
        ("bart", "changes its logits|get_seq_length"),
        ("roberta", "changes its logits|get_seq_length"),
        ("deepseek_v3", "pages were made"),  # keys have a different size than planned
        ("bamba", "linear_attention"),
        ("gemma4_text", "expected layers of one size"),
        ("seq2seq/t5", "encoder"),
        ("bloom", "attention"),  # no lookup of an attention function
    ],
)
def test_unsupported_models_are_refused(name: str, message: str) -> None:
    model, _ = build_variant(name)
    attention = model.config._attn_implementation
    with pytest.raises(ConfigError, match=message):
        serving.enable(model)
    assert model.config._attn_implementation == attention
    assert not model.training
    if name == "bart":
        assert is_enabled(serving.enable(model, probe=False))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}), ("gpt_oss", {"sliding_window": 1}), ("gpt_oss", {"sliding_window": 3}),
        # Up to transformers 5.20, this model runs sdpa by default, which has no softcap.
        ("gemma2", MODEL_OPTIONS["gemma2"]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_supported_models_pass_the_probe(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    # The probe accepts rounding, a missing softcap, and windows shorter than its sequences.
    model = build_variant(name, **options)[0].to(dtype).train()
    attention = model.config._attn_implementation
    serving.enable(model)
    assert model.config._attn_implementation == attention
    assert model.training


@pytest.mark.parametrize("page_size", [24, 2048])
def test_an_invalid_page_size_is_refused(served_llama: Any, page_size: int) -> None:
    manager = served_llama.init_continuous_batching(
        make_greedy_config(), make_batching_config(page_size=page_size)
    )
    with pytest.raises(ConfigError, match="power of two"):
        manager.warmup()


@pytest.mark.parametrize("use_cuda_graph", [True, (False, True)])
def test_cuda_graphs_are_refused_without_a_gpu(served_llama: Any, use_cuda_graph: Any) -> None:
    manager = served_llama.init_continuous_batching(make_greedy_config(), make_batching_config())
    with pytest.raises(ConfigError, match="use_cuda_graph"):
        served_llama.init_continuous_batching(
            make_greedy_config(), make_batching_config(use_cuda_graph=use_cuda_graph)
        )
    # This also restores the attention after a manager that never ran.
    serving.disable(served_llama)
    assert served_llama.config._attn_implementation == "sdpa"
    assert not manager.is_running()


@pytest.mark.usefixtures("fresh_compiler")
def test_only_a_whole_step_as_one_graph_is_refused(served_llama: Any) -> None:
    manager = served_llama.init_continuous_batching(
        make_greedy_config(), make_batching_config(default_compile_level=1)
    )
    assert manager.continuous_batching_config.varlen_compile_config is not None
    serving.enable(served_llama)
    # decode_compile_config is accepted, because the engine uses it only for its own attention.
    config = make_batching_config(
        varlen_compile_config=CompileConfig(fullgraph=True, backend="eager")
    )
    with pytest.raises(ConfigError, match="varlen_compile_config: expected fullgraph=False"):
        served_llama.init_continuous_batching(make_greedy_config(), config)


def test_the_attention_is_refused_without_enable(llama: Any) -> None:
    llama.set_attn_implementation("fp8_paged")
    with pytest.raises(Exception, match=r"fp8_paged|FP8 pages"):
        generate_batch(llama, draw_prompts()[:1])


# -- wrapped models --------------------------------------------------------------------------------


class AdapterWrapper:
    """A stand-in for PEFT's wrapper, which has the attributes of the model."""

    def __init__(self, model: Any, is_prompt_learning: bool = False) -> None:
        self._model = model
        self.active_peft_config = SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self) -> Any:
        return self._model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_wrapped_model_can_be_enabled(llama: Any) -> None:
    wrapper = AdapterWrapper(AdapterWrapper(llama))
    expected = generate_batch(serving.enable(llama), draw_prompts()[:2])
    serving.disable(llama)
    assert serving.enable(wrapper) is wrapper
    assert all(map(is_enabled, (wrapper, llama)))
    assert generate_batch(wrapper, draw_prompts()[:2]) == expected
    assert serving.disable(wrapper) is wrapper
    assert not is_enabled(llama)


def test_trained_tokens_are_refused(llama: Any) -> None:
    # An engine would omit the tokens that such an adapter adds before a prompt.
    with pytest.raises(ConfigError, match=r"adds trained tokens.*Use generate\(\)"):
        serving.enable(AdapterWrapper(llama, is_prompt_learning=True))
    assert not is_enabled(llama)


# -- the longest request ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_the_limit_is_the_longest_request_that_fits(name: str) -> None:
    # With one more token the engine would stop, because it could not free pages.
    model = make_model(name)
    serving.enable(model)
    manager = model.init_continuous_batching(
        make_greedy_config(), make_batching_config(num_pages=6)
    )
    manager.warmup()
    max_tokens = manager.batch_processor.cache.compute_max_request_tokens()
    if name == "mistral":  # windows in all layers
        assert max_tokens == 2**31 - 1
        return
    # The last token is never stored.
    prompt_ids = [[3] * (max_tokens - NEW_TOKENS + n) for n in (1, 2)]
    outputs = model.generate_batch(
        [*prompt_ids, [4, 5]],
        make_greedy_config(num_return_sequences=2),
        make_batching_config(num_pages=6),
    )
    errors = [output.error for output in outputs.values()]
    assert errors[:2] == errors[4:] == [None, None]
    assert all(f"hold {max_tokens} tokens of one request" in error for error in errors[2:4])


@pytest.mark.parametrize("is_running", [False, True])
def test_a_request_that_outgrows_the_pages_is_refused(served_llama: Any, is_running: bool) -> None:
    # The engine still answers shorter requests. The first request allocates the pages.
    manager = served_llama.init_continuous_batching(
        make_greedy_config(), make_batching_config(num_pages=6)
    )
    if is_running:
        manager.start()
    for num_tokens, max_new_tokens in ((1000, 1), (3, 1000), (1000, None)):
        with pytest.raises(ConfigError, match=r"input_ids: expected .* increase num_blocks"):
            manager.add_request([3] * num_tokens, max_new_tokens=max_new_tokens)
    if not is_running:
        manager.start()
    assert len(request_answer(manager, [3] * (manager.max_request_tokens - 1), 2)) == 2
    manager.stop(block=True)
    assert manager.add_request([3] * 1000, max_new_tokens=1) is None  # as without FP8 pages


# -- running engines -------------------------------------------------------------------------------


def test_a_stopping_manager_leaves_other_managers_running(llama: Any) -> None:
    llama.set_attn_implementation("fp8_paged")
    prompt_ids = draw_prompts()
    scales = draw_head_scales(llama)
    expected = generate_each(llama, prompt_ids, scales=scales)
    llama.set_attn_implementation("sdpa")
    serving.enable(llama, scales=scales)
    stopping_manager, manager = (
        llama.init_continuous_batching(make_greedy_config(), make_batching_config())
        for _ in range(2)
    )
    with run_manager(manager):
        with run_manager(stopping_manager):
            request_answer(stopping_manager, prompt_ids[0], 2)
        assert llama.config._attn_implementation == "fp8_paged"
        assert request_answers(manager, prompt_ids) == expected
    assert llama.config._attn_implementation == "sdpa"
    with run_manager(manager):  # again, after the attention was restored
        assert request_answer(manager, prompt_ids[1]) == expected[1]
    assert llama.config._attn_implementation == "sdpa"


def test_an_empty_prompt_does_not_affect_other_requests(served_llama: Any) -> None:
    (expected,) = generate_batch(served_llama, [[5, 6]])
    assert generate_batch(served_llama, [[], [5, 6]])[1] == expected


def test_disable_refuses_a_model_that_an_engine_runs() -> None:
    model = build_variant("llama", attn_implementation="sdpa")[0]
    enable(model, dtype="model")
    serving.enable(model)
    with run_manager(model.init_continuous_batching(make_greedy_config(), make_batching_config())):
        for change_attention in (disable, enable):
            with pytest.raises(ConfigError, match="running"):
                change_attention(model)
    assert disable(model).config._attn_implementation == "sdpa"


def test_enable_refuses_a_model_with_a_running_stock_manager() -> None:
    model = build_variant("llama", attn_implementation="sdpa")[0]
    manager = model.init_continuous_batching(make_greedy_config(), make_batching_config())
    with run_manager(manager), pytest.raises(ConfigError, match="running"):
        serving.enable(model)
    serving.enable(model)


def test_failing_steps_fail_requests(served_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(StoredLayer, "attend", mock.Mock(side_effect=ValueError("boom")))
        outputs = served_llama.generate_batch(
            [[5, 6]], make_greedy_config(), make_batching_config()
        )
    assert all(output.error == "boom" for output in outputs.values())
    assert served_llama.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="boom"), exact_states(is_engine_step=True):
        raise ValueError("boom")
    assert fp8_paged_mask(1, 2, 2, attention_mask=torch.tensor([[False, True]])) is not None
    assert generate_batch(served_llama, [[5, 6]])


def test_padding_is_not_written() -> None:
    step = EngineStep([None], 8)
    for index, num_tokens in enumerate((10, 8, 1)):
        step.add(0, num_tokens, [[2 * index, 2 * index + 1]])
    work = step.get_work(0, torch.device("cpu"))
    targets = [token for batch in work.batches for token in batch.target_tokens.tolist()]
    assert sorted(targets) == list(range(19))  # each once, because CUDA does not order writes


def test_an_unused_row_writes_to_no_page() -> None:
    # Its page in the table may belong to another request.
    table = torch.tensor([[3, 4], [7, 7]], dtype=torch.int32)
    work = make_decode_work(table, torch.tensor([9, 0], dtype=torch.int32), 8)
    assert work.table.tolist() == [[4], [-1]]
    assert work.slot_ends.tolist() == [1, 1]


def test_requests_are_admitted_after_all_running_requests_are_canceled() -> None:
    # An engine that evicts a request admits no request until a running request finishes.
    model, _ = build_variant("gqa", max_position_embeddings=512)
    serving.enable(model)
    model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    with open_manager(model, num_pages=9) as manager:
        for token in (2, 40):
            manager.add_request(
                list(range(token, token + 3 * PAGE_SIZE)), max_new_tokens=6 * PAGE_SIZE
            )
        deadline = time.monotonic() + 30
        while manager.batch_processor is None or not (
            manager.batch_processor.scheduler.block_new_requests
        ):
            assert time.monotonic() < deadline, "no request was evicted"
            time.sleep(0.001)
        scheduler = manager.batch_processor.scheduler
        (running_id,) = scheduler.active_requests
        (waiting_id,) = scheduler.waiting_requests
        manager.cancel_request(running_id)
        added_id = manager.add_request([5, 6, 7], max_new_tokens=2)
        lengths: dict[str, int] = {}
        while {waiting_id, added_id} - lengths.keys():
            output = manager.get_result(timeout=20)
            assert output is not None, lengths
            lengths[output.request_id] = len(output.generated_tokens)
        for request_id in (waiting_id, added_id):
            manager.cancel_request(request_id)  # otherwise the manager waits for it at exit
        lengths.pop(running_id, None)
        assert lengths == {waiting_id: 6 * PAGE_SIZE, added_id: 2}


class DelayedStream:
    """A stream on the CPU whose operations run when another stream waits for it."""

    device = None

    def __init__(self) -> None:
        self.operations: list[Callable[[], Any]] = []

    def wait_stream(self, stream: "DelayedStream") -> None:
        while stream.operations:
            stream.operations.pop(0)()

    def synchronize(self) -> None:
        pass


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_blocks", [0, 8])
def test_late_fills_do_not_change_the_tokens(
    llama: Any, max_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An engine fills static tensors on the current stream, and computes on its own stream.
    expected = generate_and_enable(llama, draw_prompts())
    current = DelayedStream()
    compute = DelayedStream()
    prepare = input_outputs.ContinuousBatchingIOs.prepare_batch_tensors

    def prepare_late(inputs: Any, *args: Any, **kwargs: Any) -> None:
        prepare(inputs, *args, **kwargs)
        inputs.compute_stream = compute
        for tensor in (inputs._bulk_input_tensor, inputs.block_table):
            current.operations.append(functools.partial(tensor.copy_, tensor.clone()))
            tensor.zero_()

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", prepare_late)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    manager = llama.init_continuous_batching(make_greedy_config(), make_batching_config())
    manager.continuous_batching_config.max_blocks_per_request = max_blocks
    with run_manager(manager):
        assert request_answers(manager, draw_prompts()) == expected


def test_uploads_wait_for_late_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    # Asynchronous batching resets its tensors on the current stream, and then uploads.
    current = DelayedStream()
    lengths = torch.zeros(3)
    uploaded = torch.ones(3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    current.operations.append(lengths.zero_)
    inputs: Any = SimpleNamespace(h2d_stream=DelayedStream(), compute_stream=None)
    inputs.get_model_kwargs = lambda: lengths.copy_(uploaded)
    order_streams(inputs)
    assert torch.equal(inputs.get_model_kwargs(), uploaded)
    current.wait_stream(current)
    assert torch.equal(lengths, uploaded)
