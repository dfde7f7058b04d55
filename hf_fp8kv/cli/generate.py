"""`hf-fp8kv generate`: answers to a prompt with the default cache and with FP8 pages."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType
from rich.text import Text
from transformers import DynamicCache

from ..bench.reporting import build_table, count_bytes
from ..cache.cache import FP8PagedCache
from ..calibration.plan_choice import resolve_plan
from ..errors import ConfigError
from ..formats import ADAPTIVE
from ..modeling.model_support import CACHE
from ..scales.kv_scales import warn_if_stale
from ..utils.terminal import format_size
from . import arguments
from .shared import DEMO, load_model, print_parts

ATTENTIONS = ("fp8_paged", "sdpa", "eager", "flex_attention")


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="The text to continue or answer; - reads it from stdin.")
    ] = "London is the capital of",
    model: arguments.Model = None,
    kv_cache_dtype: arguments.CacheDtype = None,
    key_dtype: arguments.KeyDtype = None,
    value_dtype: arguments.ValueDtype = None,
    plan: arguments.Plan = None,
    scales: arguments.StaticScales = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    page_size: Annotated[int, typer.Option(min=1, help="In tokens.")] = 64,
    backend: arguments.Backend = "auto",
    attn: Annotated[
        str,
        typer.Option(
            help="Attention of the FP8 run: fp8_paged, sdpa, eager, ...",
            autocompletion=arguments.offer(ATTENTIONS),
        ),
    ] = "fp8_paged",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed for a temperature above 0.")] = 0,
    device: arguments.Device = "auto",
    memory: Annotated[
        Any, typer.Option(help="Memory to fill with tokens: 8GiB, 500MB, ...", **arguments.SIZE)
    ] = "8GiB",
    as_json: arguments.Json = False,
) -> None:
    """Answer a prompt with the default cache and with FP8 pages, side by side."""
    options = arguments.page_options(ctx) | {"page_size": page_size}
    if kv_cache_dtype != ADAPTIVE:
        FP8PagedCache(**options)  # raises an error for wrong options before the model is loaded
    text = sys.stdin.read().strip() if prompt == "-" else prompt
    loaded, tokenizer = load_model(model, device)
    # None overrides what the checkpoint recommends for sampling.
    sampling = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0,
                "temperature": temperature or None, "top_p": None, "top_k": None}  # fmt: skip
    comparison = Comparison(model or DEMO, loaded, tokenizer, text, chat, sampling, seed, memory)
    runs = [comparison.run_dense(), comparison.run_paged(attn, options)]
    if as_json:
        facts = {"prompt": text, "model": comparison.name, "options": options}
        answers = {"agreement": compare_tokens(*runs), "runs": [asdict(run) for run in runs]}
        print(json.dumps({**facts, "memory_bytes": memory, **answers}))
    else:
        print_parts(comparison_table(comparison.name, text, runs, memory))


@dataclass(frozen=True)
class Run:
    """An answer and the size of its cache. Sizes are in bytes."""

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


@dataclass
class Comparison:
    """A model and a prompt, with `chat` as the message of a user."""

    name: str
    model: Any
    tokenizer: Any
    prompt: str
    chat: bool
    sampling: Mapping[str, Any]
    seed: int
    room: int  # bytes of memory

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The encoded prompt."""
        if not self.chat:
            encoded = self.tokenizer(self.prompt, return_tensors="pt")
        elif self.tokenizer.chat_template is None:
            raise ConfigError(
                f"--chat: expected a chat template, got none in {self.name}. Omit the option"
            )
        else:
            encoded = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": self.prompt}],
                add_generation_prompt=True, return_tensors="pt", return_dict=True,
            )  # fmt: skip
        if encoded["input_ids"].shape[1] == 0:
            raise ConfigError("expected a prompt of at least one token, got an empty prompt")
        # Some tokenizers also return token_type_ids, which many models do not accept.
        return {n: encoded[n].to(self.model.device) for n in ("input_ids", "attention_mask")}

    def run_dense(self) -> Run:
        """Generate with transformers' default cache and the model's default attention."""
        cache, answer = self._generate(partial(DynamicCache, config=self.model.config))
        tokens, size = cache.get_seq_length(), count_bytes(cache)
        name = f"DynamicCache {str(self.model.dtype).removeprefix('torch.')}"
        share = size / tokens
        return Run(name, "none", *answer, tokens, size, share, int(self.room / share))

    def run_paged(self, attn: str, options: Mapping[str, Any]) -> Run:
        """Generate with FP8 pages and the attention `attn`."""
        try:
            self.model.set_attn_implementation(attn)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"cannot use --attn {attn} with {self.name}: {error}") from error
        dtype, plan = resolve_plan(self.model, options["dtype"], options["plan"])
        keywords = {**options, "dtype": dtype, "plan": plan}
        cache, answer = self._generate(partial(FP8PagedCache, self.model.config, **keywords))
        warn_if_stale(self.model, cache.options.scales)
        sizes, page = cache.memory_footprint(), options["page_size"]
        # The last page is partly filled. A token's size is its share of a full page.
        room = -(-sizes.tokens // page) * page
        share = sizes.used_bytes / room + sizes.other_bytes / sizes.tokens
        plans = [*sizes.layers_by_plan]
        stored = plans[0] if len(plans) == 1 else "plans by layer"
        is_auto = all(side.is_auto for plan in cache.plan.values() for side in plan)
        scales = "none" if is_auto else str(options["scales"] or "dynamic")
        name, size = f"pages of {page}, {stored}", sizes.used_bytes + sizes.other_bytes
        return Run(name, scales, *answer, sizes.tokens, size, share, int(self.room / share))

    def _generate(
        self, make_cache: Callable[[], Any]
    ) -> tuple[Any, tuple[str, str, list[int], float | None]]:
        """Return the filled cache, and the attention, text, token ids and speed of the answer.

        Speed is in tokens per second after the first token.
        """
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        # Generate two tokens first, because kernels are compiled at their first use.
        call = {**self.inputs, CACHE: make_cache(), "max_new_tokens": 2, "min_new_tokens": 2}
        self.model.generate(**call, do_sample=False)
        torch.manual_seed(self.seed)
        call = {**self.inputs, CACHE: (cache := make_cache()), **self.sampling}
        ids = self.model.generate(**call, stopping_criteria=[stamp])[0]
        ids = ids[self.inputs["input_ids"].shape[1] :].tolist()
        stamps = stamps[-len(ids) :]
        steps = len(stamps) - 1
        speed = steps / (stamps[-1] - stamps[0]) if steps > 0 else None
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return cache, (str(self.model.config._attn_implementation), text, ids, speed)


def compare_tokens(dense: Run, paged: Run) -> dict[str, int | None]:
    """Return the number of equal tokens, the number of positions, and the first difference.

    Positions count from 0, up to the longer answer. A token without a counterpart differs.
    """
    same = [a == b for a, b in zip_longest(dense.token_ids, paged.token_ids)]
    first = None if all(same) else same.index(False)
    return {"equal": sum(same), "of": len(same), "first_difference": first}


def comparison_table(
    name: str, prompt: str, runs: Sequence[Run], room: int
) -> list[RenderableType]:
    """Return the prompt and a table with a column for each run."""
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
    columns: dict[str, Any] = dict.fromkeys(("", *(run.cache for run in runs)), "left")
    table = build_table(columns, ((name, *row) for name, row in rows.items()), show_lines=True)
    return [Text.assemble((name, "bold"), ": ", prompt), table]
