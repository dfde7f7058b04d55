"""Check torch.compile and torch.export of a model before its first eager call in a process.

    python -m tests.tools.compile_first

An eager call would load code and fill caches, which tracing could then use. The program empties the
caches of the process between cases, so each case starts like the first case.
"""

import warnings
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.modeling.model_support import find_model_class
from tests.helpers.tiny_models import build_variant

Logits = list[torch.Tensor]
MAX_CACHE_LEN = 40
# One model runs all cases. Each case also runs on a model with windows or on a model with sinks.
CASES = {
    "llama": (
        "no cache", "DynamicCache", "StaticCache", "preallocated", "preallocated, stored", "export",
    ),
    "gemma3_text": ("no cache", "StaticCache", "preallocated"),
    "gpt_oss": ("DynamicCache", "preallocated, stored", "export"),
}  # fmt: skip


def make_cache(case: str, config: Any) -> Any:
    if case == "no cache":
        return None
    if case == "DynamicCache":
        return DynamicCache(config=config)
    if case == "StaticCache":
        return StaticCache(config, max_cache_len=MAX_CACHE_LEN)
    options: dict[str, Any] = {}
    if "stored" in case:
        options = {"prefill": "stored", "dtype": "fp8_e3m4", "scales": 0.05}
    return FP8PagedCache(config, page_size=16, max_cache_len=MAX_CACHE_LEN, **options)


def clear_caches(model: PreTrainedModel) -> None:
    torch._dynamo.reset()
    counters.clear()
    find_model_class.cache_clear()
    if "_can_set_attn_implementation_cached_value" in vars(type(model)):
        del type(model)._can_set_attn_implementation_cached_value


def compute_logits(forward: Any, cache: Any, inputs: dict[str, torch.Tensor]) -> Logits:
    """Return the logits of the prompt and, with a cache, of two decoding steps after it."""
    ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    step_logits = [forward(input_ids=ids, attention_mask=mask, past_key_values=cache).logits]
    num_steps = 2 if cache is not None else 0
    for step in range(num_steps):
        mask = torch.cat([mask, mask[:, -1:]], 1)
        token = ids[:, step + 3 : step + 4]
        output = forward(input_ids=token, attention_mask=mask, past_key_values=cache)
        step_logits.append(output.logits)
    return step_logits


def continue_cache(model: Any, cache: FP8PagedCache, inputs: dict[str, torch.Tensor]) -> Logits:
    """Reorder and crop a cache. Return the logits of one more token in a fork and in the cache."""
    assert cache.host_length() == inputs["input_ids"].shape[1] + 2
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-1)
    mask = torch.ones(2, cache.host_length() + 1, dtype=torch.long)
    token = inputs["input_ids"][:, :1]
    return [
        model(input_ids=token, attention_mask=mask, past_key_values=each_cache).logits
        for each_cache in (cache.fork(), cache)
    ]


def assert_close(actual: Logits, expected: Logits) -> None:
    """Assert that logits are close. Compiled code may round differently than eager code."""
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


@torch.no_grad()
def compile_first(case: str, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    """Compile or export a model before any eager call, then compare with eager calls."""
    clear_caches(model)
    if case == "export":
        inputs = {**inputs, "use_cache": False}
        program = torch.export.export(model, (), inputs, strict=True)
        assert_close([program.module()(**inputs).logits], [model(**inputs).logits])
        return
    # AOTAutograd splits the `PagedKV` handles into tensors. All other cases only check the tracing.
    backend = "aot_eager" if case == "preallocated" else "eager"
    compiled_model = torch.compile(model, fullgraph=True, backend=backend)
    is_preallocated = case.startswith("preallocated")
    num_caches = 2 if is_preallocated else 1
    caches = [make_cache(case, model.config) for _ in range(num_caches)]
    logits_by_cache = [compute_logits(compiled_model, cache, inputs) for cache in caches]
    assert not counters["graph_break"]
    if is_preallocated:
        assert counters["stats"]["unique_graphs"] == 2, "the second cache caused a compilation"
    eager_cache = make_cache(case, model.config)
    expected = compute_logits(model, eager_cache, inputs)
    for actual in logits_by_cache:
        assert_close(actual, expected)
    if is_preallocated:
        actual = continue_cache(model, caches[0], inputs)
        assert_close(actual, continue_cache(model, eager_cache, inputs))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for variant, cases in CASES.items():
        model, inputs = build_variant(variant, attn_implementation="fp8_paged")
        assert "_can_set_attn_implementation_cached_value" not in vars(type(model)), "called before"
        for case in cases:
            compile_first(case, model, inputs)
            print(variant, case, flush=True)
