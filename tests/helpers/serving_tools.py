"""Helpers for tests of continuous batching: prompts, scales, and generation with and without it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
)
from transformers.generation.continuous_batching import offloading_manager

from hf_fp8kv import FP8PagedCache, KVScales, serving
from hf_fp8kv.scales import LayerScales
from hf_fp8kv.serving.engines.common import read_kv_sizes
from tests.helpers.margins import require_wide_margins

NEW_TOKENS = 18
PAGE_SIZE = 16  # in tokens
TokenLists = list[list[int]]
Prompts = Sequence[list[int]]


def make_batching_config(
    *, page_size: int = PAGE_SIZE, num_pages: int | None = 64, **options: Any
) -> Any:
    """Return a config with `num_pages` pages. None means that memory decides."""
    options = {"max_batch_tokens": 256, **options}
    return ContinuousBatchingConfig(page_size=page_size, num_blocks=num_pages, **options)


class OpenAIPenalties(LogitsProcessor):
    """Applies OpenAI's presence and frequency penalties to the tokens after the prompt."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = input_ids[0, self._num_prompt_tokens :].bincount(minlength=scores.shape[1])
        return scores - self._presence * (counts > 0) - self._frequency * counts


def make_greedy_config(**options: Any) -> GenerationConfig:
    """Return the settings of greedy generation of `NEW_TOKENS` tokens, without an end token."""
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    config.pad_token_id = 0
    for name, value in options.items():
        # The constructor refuses several greedy answers, so the fields are set afterwards.
        setattr(config, name, value)
    return config


def draw_head_scales(model: PreTrainedModel, *, center: bool = False) -> KVScales:
    """Return scales that differ between K and V, all layers and all heads.

    They are so large that most codes are subnormal. This coarse rounding changes the tokens.
    """
    config = model.config.get_text_config()
    num_heads, head_dim = read_kv_sizes(config)
    generator = torch.Generator().manual_seed(1)

    def draw_scales(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand((num_heads, 1), generator=generator)

    return KVScales(
        {
            index: LayerScales(
                draw_scales(10, 60),
                draw_scales(20, 80),
                torch.randn((num_heads, head_dim), generator=generator) if center else None,
            )
            for index in range(config.num_hidden_layers)
        }
    )


def draw_prompts(vocab_size: int = 99, seed: int = 6) -> TokenLists:
    """Return eight prompts of 3 to 64 tokens. Three begin with the same 48 tokens."""
    # The default is the first seed for which the answers of all tested models have wide margins,
    # with all kinds of scales.
    generator = torch.Generator().manual_seed(seed)

    def draw_tokens(num_tokens: int) -> list[int]:
        return torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()

    prefix = draw_tokens(48)
    return [
        draw_tokens(3), draw_tokens(17), draw_tokens(33), draw_tokens(16), draw_tokens(8),
        prefix + draw_tokens(16), prefix + draw_tokens(1), prefix + draw_tokens(7),
    ]  # fmt: skip


def generate_each(model: PreTrainedModel, prompts: Prompts, **options: Any) -> TokenLists:
    """Return the tokens of generate() for each prompt, in separate calls with separate caches."""
    answers = []
    for prompt in prompts:
        cache = FP8PagedCache(model, prefill="stored", page_size=PAGE_SIZE, **options)
        output = model.generate(
            torch.tensor([prompt], device=model.device), past_key_values=cache,
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            logits_processor=require_wide_margins(1e-4) if model.dtype == torch.float32 else None,
        )  # fmt: skip
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def are_exact(model: PreTrainedModel, prompts: Prompts, answers: TokenLists) -> bool:
    pairs = zip(prompts, answers, strict=True)
    return all(generate_each(model, [prompt], dtype="auto") == [answer] for prompt, answer in pairs)


def generate_and_enable(model: PreTrainedModel, prompts: Prompts, **keywords: Any) -> TokenLists:
    """Return the tokens of `generate_each` with FP8 pages, and enable serving with such pages."""
    model.set_attn_implementation("fp8_paged")
    expected = generate_each(model, prompts, **keywords)
    serving.enable(model, **keywords)
    return expected


def generate_batch(
    model: PreTrainedModel, prompts: Prompts, *, generation: Any = None, **options: Any
) -> TokenLists:
    """Return the tokens of generate_batch() in prompt order. Assert that no request fails."""
    config = options.pop("config", None) or make_batching_config(**options)
    outputs = model.generate_batch(
        list(prompts),
        generation_config=generation or make_greedy_config(),
        continuous_batching_config=config,
    )
    errors = [output.error for output in outputs.values() if output.error is not None]
    assert not errors, errors
    return [list(output.generated_tokens) for output in outputs.values()]


def open_manager(model: PreTrainedModel, generation: Any = None, **config: Any) -> Any:
    return model.continuous_batching_context_manager(
        generation_config=generation or make_greedy_config(),
        continuous_batching_config=make_batching_config(**config),
    )


@contextlib.contextmanager
def run_manager(manager: Any) -> Iterator[None]:
    manager.start()
    try:
        yield
    finally:
        manager.stop(block=True)


def wait_for_results(manager: Any, num_requests: int) -> dict[str, list[int]]:
    """Wait until `num_requests` requests are finished, and return their tokens by request id."""
    tokens: dict[str, list[int]] = {}
    while len(tokens) < num_requests:
        output = manager.get_result(timeout=60)
        assert output is not None
        assert output.error is None, output.error
        if output.is_finished():
            tokens[output.request_id] = list(output.generated_tokens)
    return tokens


def request_answer(
    manager: Any, prompt: list[int], num_tokens: int | None = None, **options: Any
) -> list[int]:
    """Return the tokens of a new request to a manager that has no other requests."""
    request_id = manager.add_request(prompt, max_new_tokens=num_tokens or NEW_TOKENS, **options)
    return wait_for_results(manager, 1)[request_id]


def request_answers(manager: Any, prompts: Prompts) -> TokenLists:
    """Return the tokens of new requests, in the order of the prompts."""
    request_ids = manager.add_requests(list(prompts), max_new_tokens=NEW_TOKENS)
    tokens = wait_for_results(manager, len(request_ids))
    return [tokens[request_id] for request_id in request_ids]


def generate_forked(model: PreTrainedModel, prompts: Prompts, num_answers: int) -> TokenLists:
    """Return `num_answers` answers to each prompt, from requests that fork after the prefill."""
    with open_manager(model, make_greedy_config(num_return_sequences=num_answers)) as manager:
        request_ids = manager.add_requests(list(prompts), max_new_tokens=NEW_TOKENS)
        tokens = wait_for_results(manager, num_answers * len(prompts))
    suffixes = ["", *(f"__child#{i}" for i in range(num_answers - 1))]
    return [tokens[request_id + suffix] for request_id in request_ids for suffix in suffixes]


class _TorchWithoutPinning:
    """A stand-in for torch that does not pin memory, for machines without an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*shape, **options)


def record_offloads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make offloads work without an accelerator. Return the list to which each appends a result."""
    offloads: list[Any] = []
    manager: Any = offloading_manager.OffloadingManager
    offload = manager._offload_to_cpu

    def offload_and_record(*args: Any) -> Any:
        offloads.append(offload(*args))
        return offloads[-1]

    monkeypatch.setattr(manager, "_offload_to_cpu", offload_and_record)
    if not torch.cuda.is_available():
        monkeypatch.setattr(offloading_manager, "torch", _TorchWithoutPinning())
    return offloads
