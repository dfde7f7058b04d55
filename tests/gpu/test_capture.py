"""Tests of captured steps with CUDA graphs.

Without a GPU, tiny models run in Triton's interpreter, and a graph repeats calls of the dispatcher.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache, disable, enable
from hf_fp8kv.attention import capture
from hf_fp8kv.modeling.model_support import CACHE
from tests.attention.test_capture import assert_equal
from tests.gpu.gpu_tools import DEVICE, MARKS, ON_GPU, make_medium_model, needs_gpu
from tests.helpers.recorded_graph import recorded_graphs
from tests.helpers.tiny_models import build_variant

pytestmark = MARKS
NEW_TOKENS = 40 if ON_GPU else 18
OPTIONS = {
    "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "eos_token_id": None, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip


def make_model(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    if name == "medium":
        return make_medium_model(num_padding=7)
    model, inputs = build_variant(name)
    return model.to(DEVICE), {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def generate(model: Any, inputs: Any, captured: bool, **keywords: Any) -> tuple[Any, Any]:
    """Return the output, and the captured step or None."""
    enable(model, capture=captured, backend="triton", **keywords.pop("options", {}))
    torch.manual_seed(0)
    with recorded_graphs() as steps:
        output = model.generate(**inputs, **{**OPTIONS, **keywords})
    return output, steps[-1] if steps else None


NAMES = ("medium", "gqa", "sliding_and_full", "softcap", "sinks", "latent", "hybrid")


@pytest.mark.parametrize("name", NAMES if ON_GPU else NAMES[1:2])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["growing", "preallocated"])
@pytest.mark.parametrize("sample", [False, True] if ON_GPU else [False])
def test_replays_give_the_bits_of_eager_steps(name: str, options: Any, sample: bool) -> None:
    model, inputs = make_model(name)
    keywords = {"options": options, "do_sample": sample}
    expected, _ = generate(model, inputs, False, disable_compile=True, **keywords)
    actual, step = generate(model, inputs, True, **keywords)
    assert_equal(actual, expected)
    assert step.num_replays == NEW_TOKENS - 4, step.obstacle


@needs_gpu
def test_a_failed_capture_leaves_everything_usable() -> None:
    """A synchronization that no operation shows makes the capture fail."""
    model, inputs = make_model("gqa")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def synchronize(states: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return forward(states)

    expected, _ = generate(model, inputs, False, do_sample=True)
    mlp.forward = synchronize
    actual, step = generate(model, inputs, True, do_sample=True)
    assert_equal(actual, expected)
    assert step.obstacle
    assert step.num_replays == 0
    del mlp.forward
    actual, step = generate(model, inputs, True, do_sample=True)
    assert_equal(actual, expected)
    assert step.num_replays > 0


@needs_gpu
def test_the_memory_of_a_graph_is_freed_with_its_call() -> None:
    model, inputs = make_model("medium")

    def measure() -> int:
        generate(model, inputs, True)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    sizes = [measure() for _ in range(4)]
    assert sizes[-1] <= sizes[1]


@needs_gpu  # the interpreter takes minutes
def test_a_chat_captures_again_when_its_pages_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MIN_RESERVED_TOKENS", 9)
    model, inputs = make_model("sliding_and_full")
    chats = []
    for captured in (False, True):
        first, _ = generate(model, inputs, captured)
        ids = torch.cat([first.sequences, first.sequences[:, :3]], 1)
        second, step = generate(model, {"input_ids": ids}, captured, past_key_values=first[CACHE])
        chats.append((first, second))
    for expected, actual in zip(*chats, strict=True):
        assert_equal(actual, expected)
    assert step.num_replays > 0


@needs_gpu  # Triton's interpreter runs in one thread
def test_threads_have_their_own_graphs() -> None:
    model, inputs = make_model("gqa")
    prompts = [inputs, {name: tensor.flip(0) for name, tensor in inputs.items()}]
    expected = [generate(model, prompt, False)[0] for prompt in prompts]
    enable(model, capture=True, backend="triton")
    with recorded_graphs() as steps, ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda prompt: model.generate(**prompt, **OPTIONS), prompts))
    for output, expected_output in zip(outputs, expected, strict=True):
        assert torch.equal(output.sequences, expected_output.sequences)
    assert len(steps) == 2


@needs_gpu  # the interpreter takes minutes
def test_an_exception_leaves_a_growing_cache() -> None:
    model, inputs = make_model("gqa")
    cache = FP8PagedCache(model, backend="triton")

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == inputs["input_ids"].shape[1] + 12:
            raise ValueError("stop")
        return scores

    with pytest.raises(ValueError, match="stop"):
        generate(model, inputs, True, past_key_values=cache, logits_processor=[fail])
    assert not cache.is_compileable
    expected, _ = generate(model, inputs, False)
    cache.reset()
    disable(model)
    actual, _ = generate(model, inputs, True, past_key_values=cache)
    assert_equal(actual, expected)
