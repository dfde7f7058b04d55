"""Count torch operations and seconds of a model's first call, compared with `DynamicCache`.

Every `generate()` has a first call, whose cache is empty. Operations inside this package's
registered operations are counted. Views are not. The contenders alternate.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from hf_fp8kv import FP8PagedCache, choose_plan
from hf_fp8kv.modeling.model_support import with_cache
from hf_fp8kv.ops import api
from hf_fp8kv.utils.environment import describe_run

from .shared import MODEL, TURNS, Result, main, with_model

PROMPT_LENGTHS = (64, 512, 2048)


class OperationCounter(TorchDispatchMode):
    """Counts the dispatched operations, except views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "hf_fp8kv":
            with self:
                return api.FUNCTIONS[function._opname](*args, **(kwargs or {}))
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def measure_first_calls(
    model: PreTrainedModel, tokenizer: Any, *, name: str, turns: int = 11,
    progress: Callable[[str], None],
) -> Result:  # fmt: skip
    """Return a row for each cache and number of tokens.

    `operations` and `seconds` (the median) are for a whole call of the model. `ratio` is the median
    over the turns of the time divided by the time of `DynamicCache`.
    """
    config, rows = model.config, []
    progress("choosing a plan")
    start = time.perf_counter()
    plan = choose_plan(model)
    plan_seconds = time.perf_counter() - start
    caches: dict[str, tuple[str, Callable[[], Any]]] = {
        "DynamicCache": ("sdpa", lambda: DynamicCache(config=config)),
        "FP8PagedCache": ("fp8_paged", lambda: FP8PagedCache(config)),
        "FP8PagedCache, adaptive": ("fp8_paged", lambda: FP8PagedCache(config, plan=plan)),
    }
    for tokens in PROMPT_LENGTHS:
        progress(f"{tokens} of up to {max(PROMPT_LENGTHS)} tokens")
        ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        ids = ids.to(model.device)

        def time_call(attention: str, make: Callable[[], Any], ids: torch.Tensor = ids) -> float:
            model.set_attn_implementation(attention)
            start = time.perf_counter()
            model(ids, **with_cache(model, make()), logits_to_keep=1)
            if ids.is_cuda:
                torch.cuda.synchronize(ids.device)
            return time.perf_counter() - start

        counts = {}
        for cache, contender in caches.items():
            time_call(*contender)
            with OperationCounter() as counter:
                time_call(*contender)
            counts[cache] = counter.count
        seconds: dict[str, list[float]] = {cache: [] for cache in caches}
        # Short calls get more turns, because an interruption takes about the time of such a call.
        for _ in range(turns * max(1, 512 // tokens)):
            for cache, contender in caches.items():
                seconds[cache].append(time_call(*contender))
        stock = seconds["DynamicCache"]
        rows += [
            {
                "cache": cache, "tokens": tokens, "operations": counts[cache],
                "operations_ratio": round(counts[cache] / counts["DynamicCache"], 3),
                "seconds": round(statistics.median(seconds[cache]), 4),
                "ratio": round(
                    statistics.median(x / y for x, y in zip(seconds[cache], stock, strict=True)), 3
                ),
            }
            for cache in caches
        ]  # fmt: skip
    settings = {"model": name, "turns": turns, "threads": torch.get_num_threads()}
    settings |= {"plan": repr(plan), "choose_plan_seconds": round(plan_seconds, 2)}
    return {**describe_run("first-call"), "settings": settings, "rows": rows}


if __name__ == "__main__":
    main(__doc__, with_model(measure_first_calls), {**MODEL, **TURNS})
