"""Tests of `enable(model, deterministic=True)`: bits do not depend on batch, chunks or engine."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.pytorch_utils import Conv1D

from hf_fp8kv import ConfigError, FP8PagedCache, PrefixStore, choose_plan, disable, enable, serving
from hf_fp8kv.attention.deterministic import BLOCK_ROWS
from hf_fp8kv.modeling.methods import ModelMethod
from hf_fp8kv.ops.cpu import backend as cpu_backend
from tests.helpers.tiny_models import build_variant

Tensor = torch.Tensor
PAGE_SIZE = 16
Result = tuple[Tensor, list[Tensor]]


def make_ids(batch: int, num_tokens: int) -> Tensor:
    return torch.randint(3, 90, (batch, num_tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def read_chunks(model: Any, ids: Tensor, sizes: list[int] | int, cache: Any = None) -> Result:
    cache = cache or FP8PagedCache(model, prefill="stored", page_size=PAGE_SIZE)
    logits = [model(chunk, past_key_values=cache).logits for chunk in ids.split(sizes, 1)]
    states = [handle.dense() for layer in cache.layers for handle in (layer.keys, layer.values)]
    return torch.cat(logits, 1), states


@pytest.fixture
def model() -> Any:
    return build_variant("gqa", attn_implementation="fp8_paged")[0]


def draw_chunk_sizes(rng: random.Random, num_tokens: int) -> list[int]:
    sizes: list[int] = []
    while (num_left := num_tokens - sum(sizes)) > 0:
        sizes.append(min(num_left, rng.randint(1, rng.choice([1, 3, PAGE_SIZE, 40, num_tokens]))))
    return sizes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gqa", torch.float32), ("sliding", torch.float32), ("latent", torch.float32),
        ("softcap", torch.float32), ("sinks", torch.float32), ("gpt2", torch.float32),
        ("latent", torch.bfloat16),
    ],
)  # fmt: skip
def test_batches_and_chunks_change_no_bit(name: str, dtype: torch.dtype) -> None:
    model = build_variant(name, attn_implementation="fp8_paged", dtype=dtype)[0]
    enable(model, deterministic=True, page_size=PAGE_SIZE)
    # "gqa" gets more tokens than a span of sums (512). A window of 16 tokens has one span.
    num_tokens = 530 if name == "gqa" else 90
    rng = random.Random(name)
    ids = make_ids(5, num_tokens)
    logits, states = read_chunks(model, ids[:1], [num_tokens])
    for _ in range(3):
        order = rng.sample(range(5), rng.randint(1, 5))
        if 0 not in order:
            order[0] = 0
        actual, actual_states = read_chunks(model, ids[order], draw_chunk_sizes(rng, num_tokens))
        row = order.index(0)
        assert torch.equal(actual[row], logits[0]), order
        for actual_state, state in zip(actual_states, states, strict=True):
            assert torch.equal(actual_state[row], state[0]), order


@pytest.mark.parametrize("name", ["gqa", "sliding"])
def test_padding_after_a_sequence_changes_no_bit(name: str) -> None:
    model, _ = build_variant(name, attn_implementation="fp8_paged")
    enable(model, deterministic=True, page_size=PAGE_SIZE)
    ids = make_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    cache = FP8PagedCache(model, prefill="stored", page_size=PAGE_SIZE)
    actual = model(ids, attention_mask=mask, past_key_values=cache).logits[1, :25]
    assert torch.equal(actual, read_chunks(model, ids[1:, :25], 25)[0][0])


def test_a_prefix_store_separates_deterministic_pages(model: Any, tmp_path: Path) -> None:
    logits = {}
    for deterministic in (False, True, True):
        enable(
            model, prefix_store=PrefixStore(tmp_path), deterministic=deterministic,
            page_size=PAGE_SIZE,
        )  # fmt: skip
        output = model.generate(
            make_ids(1, 40), max_new_tokens=1, output_logits=True, return_dict_in_generate=True
        )
        logits[output.past_key_values.memory_footprint().restored_tokens] = output.logits[0]
    # The first two calls restore no pages, and the third call restores two pages.
    assert sorted(logits) == [0, 32]
    assert torch.equal(logits[32], logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("plan", ["adaptive", "model"])
def test_a_training_pass_has_the_logits_of_a_rollout(model: Any, side: str, plan: str) -> None:
    """Trainers pass no positions, so positions count all tokens of a sequence except padding.

    PEFT calls `forward`. The test passes the mask by position.
    """
    plan = choose_plan(model) if plan == "adaptive" else plan
    enable(model, training="stored", deterministic=True, plan=plan, page_size=PAGE_SIZE)
    lengths = torch.tensor([[70], [35], [5]])
    ids = make_ids(3, 70)
    column = torch.arange(70)[None]
    mask = column < lengths if side == "right" else column >= 70 - lengths
    outputs = model.train().forward(ids, mask.long(), use_cache=False).logits
    assert outputs.requires_grad
    for sequence, is_token, logits in zip(ids, mask, outputs, strict=True):
        cache = FP8PagedCache(model, prefill="stored", page_size=PAGE_SIZE, plan=plan)
        actual = read_chunks(model, sequence[None, is_token], 5, cache)[0][0]
        assert torch.equal(actual, logits[is_token])


def test_an_engine_gives_the_probabilities_of_a_cache(model: Any) -> None:
    """Requests of several lengths share steps, and the token limit of a step splits prompts."""
    with pytest.raises(ConfigError, match=r"deterministic: .*windows"):
        serving.enable(build_variant("sliding")[0], deterministic=True)
    serving.enable(model, deterministic=True)
    rows = make_ids(4, 60).tolist()
    prompts = [rows[0], rows[1][:3], rows[2][:31], rows[3][:17]]
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        return_logprobs=True, max_batch_tokens=48, num_blocks=64, use_cuda_graph=False
    )
    answers = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        ids = torch.tensor([prompt + answer.generated_tokens])
        model.set_attn_implementation("fp8_paged")
        logits = read_chunks(model, ids[:, :-1], [1] * (ids.shape[1] - 1))[0][0, len(prompt) - 1 :]
        chosen = logits.softmax(-1).gather(1, ids[0, len(prompt) :, None]).log()[:, 0]
        assert answer.logprobs == chosen.tolist()


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (torch.nn.Linear(8, 5), (1, 1)), (torch.nn.Linear(8, 5), (0,)),
        (torch.nn.Linear(8, 5), (3, BLOCK_ROWS + 1)), (Conv1D(5, 8), (BLOCK_ROWS - 1,)),
        (torch.nn.SiLU(), (BLOCK_ROWS,)),
    ],
)  # fmt: skip
def test_deterministic_modules_give_the_stock_results_and_gradients(
    model: Any, module: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    model.extra = copy.deepcopy(module)
    states = torch.randn(*shape, 8, generator=torch.Generator().manual_seed(0))
    outputs_and_gradients = []
    for switch in (disable, lambda model: enable(model, deterministic=True)):
        switch(model)
        model.extra.zero_grad()
        inputs = states.clone().requires_grad_()
        output = model.extra(inputs)
        (output.sin() * torch.arange(output.shape[-1])).sum().backward()
        outputs_and_gradients.append(
            [output, inputs.grad, *(weight.grad for weight in model.extra.parameters())]
        )
    torch.testing.assert_close(*outputs_and_gradients)


@pytest.mark.parametrize("num_threads", [1, 3, 5])
def test_incomplete_vectors_change_no_bit(num_threads: int, monkeypatch: Any) -> None:
    """torch computes incomplete vectors at the end of each thread's part with different code.

    Threads share the spans of one sequence, or compute whole sequences of a batch.
    """
    monkeypatch.setattr(cpu_backend, "MIN_THREAD_VALUES", 1)
    monkeypatch.setattr(cpu_backend, "SPAN_TOKENS", 16)
    torch.set_num_threads(num_threads)  # conftest.py resets the number before the next test
    model, _ = build_variant("gqa", attn_implementation="fp8_paged", intermediate_size=4100)
    enable(model, deterministic=True)
    logits, _ = read_chunks(model, make_ids(1, 40), [40])
    assert torch.equal(read_chunks(model, make_ids(3, 40), [9, 1, 30])[0][:1], logits)


# Matrix products of the backend "torch" have the size of a page.
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("cpu", {"page_size": 32}), ("cpu", {"page_size": 256}), ("torch", {"page_size": 16}),
        ("cpu", {"page_size": 16, "max_cache_len": 140}),
    ],
)  # fmt: skip
def test_page_sizes_backends_and_preallocation_change_no_bit(
    model: Any, backend: str, options: dict
) -> None:
    enable(model, deterministic=True, backend=backend)
    ids = make_ids(2, 130)
    cache, second_cache = (
        FP8PagedCache(model, prefill="stored", backend=backend, **each_options)
        for each_options in ({"page_size": PAGE_SIZE}, options)
    )
    logits, _ = read_chunks(model, ids[:1], [130], cache)
    assert torch.equal(read_chunks(model, ids, [40, 1, 89], second_cache)[0][:1], logits)


@pytest.mark.parametrize(
    ("message", "keywords"),
    [("page_size=8", {"page_size": 8}), ("padding", {}), ("prefill", {"prefill": "exact"}),
     ("'sdpa'", {})],
)  # fmt: skip
def test_refused_calls_store_no_tokens(message: str, keywords: dict[str, Any]) -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    enable(model, deterministic=True)
    if message == "'sdpa'":
        model.set_attn_implementation("sdpa")
    for config in (model.config, None):
        cache = FP8PagedCache(config, **{"prefill": "stored", **keywords})
        with pytest.raises(ConfigError, match=message):
            model.forward(**inputs, past_key_values=cache)
        assert cache.get_seq_length() == 0


class Adapter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(99, 64))


@pytest.mark.parametrize("module", [torch.nn.Linear(64, 99, bias=False), Adapter()])
def test_modules_added_later_are_refused(model: Any, module: torch.nn.Module) -> None:
    enable(model, deterministic=True)
    model.lm_head = module
    with pytest.raises(ConfigError, match=f"got a new {type(module).__name__}"):
        model(make_ids(1, 9), past_key_values=FP8PagedCache(model, prefill="stored"))


def test_tokens_may_match_the_number_of_experts() -> None:
    """A bias per expert is not treated as a bias per token."""
    model, _ = build_variant("minimax_m2", attn_implementation="fp8_paged")
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_()
    enable(model, deterministic=True, page_size=PAGE_SIZE)
    ids = make_ids(model.config.num_local_experts, 20)
    assert torch.equal(
        read_chunks(model, ids, [1] * 20)[0][:1], read_chunks(model, ids[:1], [20])[0]
    )


class Router(torch.nn.Module):
    """A module that multiplies by the weight of a submodule, as in LongcatFlash."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = torch.nn.Linear(64, 6)

    def forward(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, self.classifier.weight)


def test_routers_strided_rows_and_softmax_change_no_bit(model: Any) -> None:
    model.router = Router()
    model.linear = torch.nn.Linear(64, 6)
    model.softmax = torch.nn.Softmax(-1)
    rows = torch.randn(2 * BLOCK_ROWS, 129, generator=torch.Generator().manual_seed(0))[:, 1:65]
    enable(model, deterministic=True)
    for module in (model.router, model.linear):
        single_rows = [module(row[None]) for row in rows.clone()]
        assert torch.equal(module(rows), torch.cat(single_rows))
    assert torch.equal(model.softmax(rows), rows.softmax(-1))


def test_disable_restores_forward_and_copies_stay_deterministic() -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    logits = model(**inputs, use_cache=False).logits
    enable(model, deterministic=True)
    for each_model in (model, copy.deepcopy(model)):
        with pytest.raises(ConfigError, match="attention over stored pages"):
            each_model(**inputs, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    cache = FP8PagedCache(model)
    with pytest.raises(ConfigError, match=r"torch\.compile"), torch.no_grad():
        compiled(make_ids(2, 5), past_key_values=cache)
    serving.enable(model, deterministic=True)
    serving.disable(model)
    assert model.generate(make_ids(2, 5), max_new_tokens=2).shape == (2, 7)
    with pytest.raises(ConfigError, match="padding"):
        model.generate(**inputs, max_new_tokens=2)
    disable(model)
    assert torch.equal(model(**inputs, use_cache=False).logits, logits)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("gqa", {"prefill": "exact"}, "prefill='stored'"),
        ("gqa", {"page_size": 8}, "pages of 16 tokens"),
        ("gqa", {"skip_layers": [1]}, r"not stored in pages \(1\)"),
        ("cross_attention", {}, "encoder-decoder"),
        ("alibi", {}, "does not use"),
        ("hybrid", {}, "not stored in pages"),
        ("phi3", {}, "RoPE"),  # of the type "longrope"
        ("qwen2_moe", {}, "calls sigmoid"),
        ("jetmoe", {}, "can be run"),
    ],
)
def test_unsupported_models_and_options_are_refused(
    name: str, keywords: dict[str, Any], message: str
) -> None:
    model, _ = build_variant(name)
    if name == "phi3":
        model.config.rope_parameters = {"rope_type": "longrope"}
    with pytest.raises(ConfigError, match=f"deterministic: .*{message}"):
        enable(model, deterministic=True, **keywords)
    assert not any("forward" in vars(module) for module in model.modules())


def test_disable_undoes_an_interrupted_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_variant("gqa")[0]
    stock_attributes = [set(vars(module)) for module in model.modules()]
    install = ModelMethod.install

    def interrupt_at_the_head(method: ModelMethod) -> None:
        if method.model is model.lm_head:
            raise KeyboardInterrupt
        install(method)

    monkeypatch.setattr(ModelMethod, "install", interrupt_at_the_head)
    with pytest.raises(KeyboardInterrupt):
        enable(model, dtype="int8", deterministic=True)
    assert [set(vars(module)) for module in model.modules()] == stock_attributes
