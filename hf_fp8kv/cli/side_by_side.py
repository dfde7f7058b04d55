"""Side-by-side comparison of the default cache and FP8 pages, for `hf-fp8kv generate`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ..cache.cache import FP8PagedCache
from ..calibration.plan_choice import resolve_plan
from ..errors import ConfigError
from ..modeling.model_support import CACHE
from ..scales.kv_scales import warn_if_stale
from ..utils.tensors import collect_tensors
from ..utils.terminal import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Run:
    """One answer and the size of its cache; sizes in bytes, speed in tokens per second."""

    cache: str
    scales: str
    attention: str
    text: str
    token_ids: list[int]
    tokens_per_second: float | None
    cached_tokens: int
    cache_bytes: int
    bytes_per_token: float
    tokens_that_fit: int


class Comparison:
    """A model and a prompt; each answer is one `Run`."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        prompt: str,
        chat: bool,
        sampling: Mapping[str, Any],
        seed: int,
        room: int,
    ) -> None:
        """Encode the prompt, with `chat` as a user's message. `room` is the memory in bytes."""
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.sampling, self.seed, self.room = sampling, seed, room
        if not chat:
            encoded = tokenizer(prompt, return_tensors="pt")
        elif tokenizer.chat_template is None:
            raise ConfigError(f"--chat: expected a chat template, {name} has none; omit the option")
        else:
            encoded = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True, return_tensors="pt", return_dict=True,
            )  # fmt: skip
        if encoded["input_ids"].shape[1] == 0:
            raise ConfigError("expected a prompt of at least one token, got an empty one")
        # Some tokenizers also return token_type_ids, which many models do not take.
        names = ("input_ids", "attention_mask")
        self.inputs = {name: encoded[name].to(model.device) for name in names}

    def run_dense(self) -> Run:
        """Answer with transformers' default cache and the model's own attention."""
        cache, ids, speed = self._generate(partial(DynamicCache, config=self.model.config))
        size = sum(t.nbytes for layer in cache.layers for t in collect_tensors(vars(layer)))
        tokens = cache.get_seq_length()
        name = f"DynamicCache {str(self.model.dtype).removeprefix('torch.')}"
        return self._run(ids, speed, name, "none", tokens, size, size / tokens)

    def run_paged(self, attn: str, options: Mapping[str, Any]) -> Run:
        """Answer with FP8 pages, read by the attention `attn`."""
        try:
            self.model.set_attn_implementation(attn)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"--attn {attn} does not work with {self.name}: {error}") from error
        dtype, plan = resolve_plan(self.model, options["dtype"], options["plan"])
        keywords = {**options, "dtype": dtype, "plan": plan}
        cache, ids, speed = self._generate(partial(FP8PagedCache, self.model.config, **keywords))
        warn_if_stale(self.model, cache.options.scales)
        sizes, page = cache.memory_footprint(), options["page_size"]
        # The last page is partly filled: a token's size is its share of a full page.
        full = -(-sizes.tokens // page) * page
        share = sizes.used_bytes / full + sizes.other_bytes / sizes.tokens
        plans = set(cache.plan.values())
        plan = next(iter(plans))
        stored = "plans by layer" if len(plans) > 1 else str(plan.k if plan.k == plan.v else plan)
        is_auto = all(side.is_auto for plan in plans for side in plan)
        scales = "none" if is_auto else str(options["scales"] or "dynamic")
        size = sizes.used_bytes + sizes.other_bytes
        return self._run(
            ids, speed, f"pages of {page}, {stored}", scales, sizes.tokens, size, share
        )

    def _generate(self, make_cache: Callable[[], Any]) -> tuple[Any, list[int], float | None]:
        """Return the filled cache, the new tokens, and the tokens per second after the first."""
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        # Two tokens for warming up: kernels are compiled at their first use.
        call = {**self.inputs, CACHE: make_cache(), "max_new_tokens": 2, "min_new_tokens": 2}
        self.model.generate(**call, do_sample=False)
        torch.manual_seed(self.seed)
        call = {**self.inputs, CACHE: (cache := make_cache()), **self.sampling}
        ids = self.model.generate(**call, stopping_criteria=[stamp])[0]
        ids = ids[self.inputs["input_ids"].shape[1] :].tolist()
        stamps = stamps[-len(ids) :]
        steps = len(stamps) - 1
        return cache, ids, steps / (stamps[-1] - stamps[0]) if steps > 0 else None

    def _run(
        self, ids: list[int], speed: float | None, cache: str, scales: str,
        tokens: int, size: int, per_token: float,
    ) -> Run:  # fmt: skip
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        attention, fit = str(self.model.config._attn_implementation), int(self.room / per_token)
        return Run(cache, scales, attention, text, ids, speed, tokens, size, per_token, fit)


def compare_tokens(one: Run, other: Run) -> dict[str, int | None]:
    """Return the number of equal tokens, of all positions, and the first position that differs.

    Positions count from 0, up to the longer answer: a token without a counterpart differs.
    """
    same = [a == b for a, b in zip_longest(one.token_ids, other.token_ids)]
    first = None if all(same) else same.index(False)
    return {"equal": sum(same), "of": len(same), "first_difference": first}


def comparison_table(
    name: str, prompt: str, runs: Sequence[Run], room: int
) -> "list[RenderableType]":
    """Return the prompt and a table with a column for each run."""
    from rich.table import Table
    from rich.text import Text

    dense, paged = runs
    tokens = compare_tokens(dense, paged)
    first = tokens["first_difference"]
    differs = "" if first is None else f", first difference at token {first + 1}"
    ratio = f" ({paged.bytes_per_token / dense.bytes_per_token:.2f} x)"
    sizes = [format_size(run.bytes_per_token) for run in runs]
    rows: dict[str, Sequence[str]] = {
        "answer": [run.text for run in runs],
        "same tokens": ["", f"{tokens['equal']} of {tokens['of']}{differs}"],
        "scales": [run.scales for run in runs],
        "attention": [run.attention for run in runs],
        "cache": [f"{format_size(x.cache_bytes)} for {x.cached_tokens} tokens" for x in runs],
        "per token": [sizes[0], sizes[1] + ratio],
        f"fit into {format_size(room)}": [f"{run.tokens_that_fit:,} tokens" for run in runs],
        "tokens/s": [f"{x.tokens_per_second:.1f}" if x.tokens_per_second else "-" for x in runs],
    }
    table = Table(show_lines=True)
    table.add_column("", style="bold")
    for run in runs:
        table.add_column(run.cache, ratio=1, overflow="fold")
    for heading, cells in rows.items():
        table.add_row(heading, *map(Text, cells))
    return [Text.assemble((name, "bold"), ": ", prompt), table]
