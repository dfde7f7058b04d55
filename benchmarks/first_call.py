"""Measure torch operations and the time of a model's first call, compared with `DynamicCache`.

Every `generate()` has a first call, whose cache is empty. The count includes the operations inside
this package's registered operations, and excludes views. Timed calls of the caches alternate.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from hf_fp8kv import FP8PagedCache, choose_plan
from hf_fp8kv.bench.contenders import compute_ratios
from hf_fp8kv.modeling.model_support import with_cache
from hf_fp8kv.ops import api
from hf_fp8kv.utils.environment import describe_run

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
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def measure_first_calls(
    model: PreTrainedModel, tokenizer: Any, *, name: str, turns: int = 11,
    progress: Callable[[str], None],
) -> Result:  # fmt: skip
    """Return a result with a row for each cache and prompt length.

    `operations` and `seconds` (the median) are for a whole call of the model. `ratio` is the median
    over the turns of the time divided by the time of `DynamicCache`.
    """
    config = model.config
    rows: list[Result] = []
    progress("choosing a plan")
    plan_start = time.perf_counter()
    plan = choose_plan(model)
    plan_seconds = time.perf_counter() - plan_start
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

        def time_call(
            attention: str, make_cache: Callable[[], Any], ids: torch.Tensor = ids
        ) -> float:
            model.set_attn_implementation(attention)
            start = time.perf_counter()
            model(ids, **with_cache(model, make_cache()), logits_to_keep=1)
            if ids.is_cuda:
                torch.cuda.synchronize(ids.device)
            return time.perf_counter() - start

        operation_counts = {}
        for label, contender in contenders.items():
            time_call(*contender)
            with OperationCounter() as counter:  # type: ignore[no-untyped-call]
                time_call(*contender)
            operation_counts[label] = counter.count
        seconds: dict[str, list[float]] = {label: [] for label in contenders}
        # Short calls get more turns, because one interruption can take as long as the whole call.
        for _ in range(turns * max(1, 512 // num_tokens)):
            for label, contender in contenders.items():
                seconds[label].append(time_call(*contender))
        rows += [
            {
                "cache": label, "tokens": num_tokens, "operations": num_operations,
                "operations_ratio": round(num_operations / operation_counts["DynamicCache"], 3),
                "seconds": round(statistics.median(seconds[label]), 4),
                "ratio": round(statistics.median(ratios), 3),
            }
            for label, num_operations in operation_counts.items()
            for ratios in [compute_ratios(seconds, label, "DynamicCache")]
        ]  # fmt: skip
    settings = {"model": name, "turns": turns, "threads": torch.get_num_threads()}
    settings |= {"plan": repr(plan), "choose_plan_seconds": round(plan_seconds, 2)}
    return {**describe_run("first-call"), "settings": settings, "rows": rows}


if __name__ == "__main__":
    main(__doc__, load_model_before(measure_first_calls), {**MODEL_OPTIONS, **TURNS_OPTION})
