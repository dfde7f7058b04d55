"""Measure torch operations and the time of a model's first call, compared with `DynamicCache`.

Every `generate()` has a first call, whose cache is empty. The count includes the operations inside
this package's registered operations, and excludes views. Timed calls of the caches alternate.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from hf_fp8kv import FP8PagedCache, choose_plan
from hf_fp8kv.modeling.model_support import with_cache
from hf_fp8kv.ops import api
from hf_fp8kv.utils.timing import compute_ratios, take_turns

from .shared import MODEL_OPTIONS, TURNS_OPTION, Result, load_model_before, main

PROMPT_LENGTHS = (64, 512, 2048)


class OperationCounter(TorchDispatchMode):
    """Counts the dispatched operations, except views."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "hf_fp8kv":
            with self:
                return api.FUNCTIONS[func._opname](*args, **(kwargs or {}))
        if not func.is_view:
            self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def measure_first_calls(
    model: PreTrainedModel, tokenizer: Any, *, turns: int = 11,
    progress: Callable[[str], None],
) -> Result:  # fmt: skip
    """Return a row for each cache and prompt length, the model's plan, and the time to choose it.

    `operations` and `seconds` (the median) are for a whole call of the model. `ratio` is the median
    over the turns of the time divided by the time of `DynamicCache`.
    """
    config = model.config
    rows: list[Result] = []
    progress("choosing a plan")
    plan_start = time.perf_counter()
    plan = choose_plan(model)
    plan_seconds = time.perf_counter() - plan_start

    def call_model(attention: str, make_cache: Callable[[], Any], ids: torch.Tensor) -> None:
        model.set_attn_implementation(attention)
        model(ids, **with_cache(model, make_cache()), logits_to_keep=1)

    # The attention implementation and the function that makes the cache, by name.
    contenders: dict[str, tuple[str, Callable[[], Any]]] = {
        "DynamicCache": ("sdpa", lambda: DynamicCache(config=config)),
        "FP8PagedCache": ("fp8_paged", lambda: FP8PagedCache(config)),
        "FP8PagedCache, adaptive": ("fp8_paged", lambda: FP8PagedCache(config, plan=plan)),
    }
    for num_tokens in PROMPT_LENGTHS:
        progress(f"{num_tokens} of up to {max(PROMPT_LENGTHS)} tokens")
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(1000, (1, num_tokens), generator=generator).to(model.device)
        calls = {
            name: partial(call_model, attention, make_cache, ids)
            for name, (attention, make_cache) in contenders.items()
        }
        # Short calls get more turns, because one interruption can take as long as the whole call.
        seconds = take_turns(calls, turns * max(1, 512 // num_tokens), str(model.device))
        for name, run in calls.items():
            with OperationCounter() as counter:  # type: ignore[no-untyped-call]
                run()
            rows.append({
                "cache": name, "tokens": num_tokens, "operations": counter.count,
                "seconds": round(statistics.median(seconds[name]), 4),
                "ratio": round(
                    statistics.median(compute_ratios(seconds, name, "DynamicCache")), 3),
            })  # fmt: skip
    return {"rows": rows, "plan": repr(plan), "choose_plan_seconds": round(plan_seconds, 2)}


if __name__ == "__main__":
    main(__doc__, load_model_before(measure_first_calls), {**MODEL_OPTIONS, **TURNS_OPTION})
