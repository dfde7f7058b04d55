"""Tests of the noise of sampled tokens, which depends only on the seed and the request's id."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_fp8kv import serving
from hf_fp8kv.serving.engines.noise import NoiseLogitsWarper
from tests.helpers.serving_tools import NEW_TOKENS, PAGE_SIZE, draw_prompts, generate_batch
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text


@pytest.fixture(scope="module")
def model() -> Any:
    return serving.enable(build_variant("llama")[0], deterministic=True)


def sample_tokens(
    model: Any, prompt_ids: list[list[int]], *, seed: int = 3, num_answers: int = 1, **batching: Any
) -> list[list[int]]:
    torch.manual_seed(seed)
    config = GenerationConfig(
        do_sample=True, temperature=1.1, top_k=40, top_p=0.95, num_return_sequences=num_answers,
        max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    return generate_batch(model, prompt_ids, generation=config, **batching)


def test_other_requests_do_not_change_tokens(model: Any) -> None:
    # Other requests have different lengths. They share steps, split prompts and evict pages.
    prompt_ids = draw_prompts()
    other_prompt_ids = draw_prompts(seed=7)
    tokens = sample_tokens(model, prompt_ids)
    assert len(set(map(tuple, tokens))) == len(prompt_ids)
    assert sample_tokens(model, prompt_ids, max_batch_tokens=16) == tokens
    assert sample_tokens(model, prompt_ids, num_pages=14) == tokens
    assert sample_tokens(model, prompt_ids[:1]) == tokens[:1]
    for index in (0, 6):
        mixed_ids = [*other_prompt_ids[:index], prompt_ids[index], *other_prompt_ids[index + 1 :]]
        assert sample_tokens(model, mixed_ids)[index] == tokens[index]


def test_different_seeds_and_equal_prompts_give_different_tokens(model: Any) -> None:
    prompt_ids = [draw_prompts()[1]] * 4
    tokens = sample_tokens(model, prompt_ids)
    assert len(set(map(tuple, tokens))) == 4
    assert not set(map(tuple, sample_tokens(model, prompt_ids, seed=4))) & set(map(tuple, tokens))
    config = ContinuousBatchingConfig(seed=5, num_blocks=64, page_size=PAGE_SIZE)
    first_tokens, second_tokens = (
        sample_tokens(model, prompt_ids, seed=seed, config=config) for seed in (1, 2)
    )
    assert first_tokens == second_tokens != tokens  # the seed of the config overrides torch's seed
    answers = sample_tokens(model, draw_prompts()[:3], num_answers=3)
    assert len(set(map(tuple, answers))) == 9
    assert sample_tokens(model, draw_prompts()[:1], num_answers=3) == answers[:3]


def test_logprobs_contain_no_noise() -> None:
    processors = SimpleNamespace(logits_processor=[], tensors_required=0, do_processing=False)
    warper = NoiseLogitsWarper(processors)
    model_runner = SimpleNamespace(_sample=None)
    warper.install(model_runner)
    assert (processors.logits_processor, processors.tensors_required) == ([warper], 1)
    states = [
        SimpleNamespace(request_id=f"req_{index}", position_offset=position)
        for index, position in ((0, 4), (1, 5), (2, 4), (3, 5), (0, 5))
    ]
    keys = warper.prepare_tensor_args([SimpleNamespace(state=state) for state in states])
    assert len(keys.unique()) == 5
    scores = torch.randn(1, 50, 40)
    output_ids = torch.zeros(2, 60, dtype=torch.int32)
    warper(scores[0], torch.arange(1, 61, dtype=torch.int32))
    model_runner._sample(scores, output_ids)
    tokens = output_ids[0, :50].long()
    assert not torch.equal(tokens, scores[0].argmax(-1))
    expected = scores[0].softmax(-1).gather(1, tokens[:, None])[:, 0].log()
    assert torch.equal(output_ids[1, :50].view(torch.float32), expected)
    with pytest.raises(RuntimeError, match="finite logits"):
        model_runner._sample(scores * torch.nan, output_ids)
