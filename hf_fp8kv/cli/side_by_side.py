"""Side-by-side comparison of the default cache and FP8 pages, for `hf-fp8kv generate`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..utils.terminal import format_size

if TYPE_CHECKING:
    import torch
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
    """A model, its tokenizer and the sampling options; each answer is one `Run`."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Prepare for greedy decoding (a temperature of 0), or for sampling with the seed."""
        self.name, self.model, self.tokenizer, self.seed = name, model, tokenizer, seed
        self.sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "do_sample": temperature > 0,
        }
        # None overrides what the checkpoint recommends for sampling.
        self.sampling |= {"temperature": temperature or None, "top_p": None, "top_k": None}

    def encode(self, text: str, chat: bool) -> Mapping[str, Any]:
        """Return the arguments of generate() for a text, or for one user message of a chat."""
        if not chat:
            encoded = self.tokenizer(text, return_tensors="pt")
        elif self.tokenizer.chat_template is None:
            raise ConfigError(
                f"--chat: expected a chat template, {self.name} has none; omit the option"
            )
        else:
            encoded = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True, return_tensors="pt", return_dict=True,
            )  # fmt: skip
        if encoded["input_ids"].shape[1] == 0:
            raise ConfigError("expected a prompt of at least one token, got an empty one")
        # Some tokenizers also return token_type_ids, which many models do not take.
        names = ("input_ids", "attention_mask")
        return {name: encoded[name].to(self.model.device) for name in names}

    def run_dense(self, inputs: Mapping[str, Any], room: int) -> Run:
        """Answer with transformers' default cache and the model's own attention."""
        from transformers import DynamicCache

        ids, speed, cache = self._generate(inputs, lambda: DynamicCache(config=self.model.config))
        tensors = [
            t for layer in cache.layers for t in vars(layer).values() if hasattr(t, "nbytes")
        ]
        size, tokens = sum(t.nbytes for t in tensors), cache.get_seq_length()
        dtype = str(self.model.dtype).removeprefix("torch.")
        return self._run(
            f"DynamicCache {dtype}", "none", ids, speed, tokens, size, size / tokens, room
        )

    def run_paged(
        self, inputs: Mapping[str, Any], room: int, attn: str, options: Mapping[str, Any]
    ) -> Run:
        """Answer with FP8 pages, read by the attention `attn`."""
        from .. import FP8PagedCache
        from ..calibration.plan_choice import resolve_plan
        from ..scales.kv_scales import warn_if_stale

        try:
            self.model.set_attn_implementation(attn)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"--attn {attn} does not work with {self.name}: {error}") from error
        dtype, plan = resolve_plan(self.model, options["dtype"], options["plan"])
        keywords = {**options, "dtype": dtype, "plan": plan}
        ids, speed, cache = self._generate(
            inputs, lambda: FP8PagedCache(self.model.config, **keywords)
        )
        warn_if_stale(self.model, cache.options.scales)
        sizes, page = cache.memory_footprint(), options["page_size"]
        tokens, size = sizes.tokens, sizes.used_bytes + sizes.other_bytes
        # The last page is partly filled: a token's size is its share of a full page.
        share = sizes.used_bytes / (-(-tokens // page) * page) + sizes.other_bytes / tokens
        plans = set(cache.plan.values())
        plan = next(iter(plans))
        stored = "plans by layer" if len(plans) > 1 else str(plan.k if plan.k == plan.v else plan)
        name = f"pages of {page}, {stored}"
        is_auto = all(side.is_auto for plan in plans for side in plan)
        scales = "none" if is_auto else str(options["scales"] or "dynamic")
        return self._run(name, scales, ids, speed, tokens, size, share, room)

    def _generate(
        self, inputs: Mapping[str, Any], make: Callable[[], Any]
    ) -> tuple[list[int], float | None, Any]:
        """Return the new tokens, the tokens per second after the first one, and the cache."""
        import torch

        from ..modeling.model_support import CACHE

        stamps: list[float] = []

        def stamp(input_ids: "torch.Tensor", *_: Any, **__: Any) -> "torch.Tensor":
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        # Two tokens for warming up: kernels are compiled at their first use.
        self.model.generate(
            **inputs, **{CACHE: make()}, max_new_tokens=2, min_new_tokens=2, do_sample=False
        )
        torch.manual_seed(self.seed)
        cache = make()
        output = self.model.generate(
            **inputs, **{CACHE: cache}, stopping_criteria=[stamp], **self.sampling
        )
        stamps = stamps[-(output.shape[1] - inputs["input_ids"].shape[1]) :]
        steps = len(stamps) - 1
        speed = steps / (stamps[-1] - stamps[0]) if steps > 0 else None
        return output[0, inputs["input_ids"].shape[1] :].tolist(), speed, cache

    def _run(
        self, name: str, scales: str, ids: list[int], speed: float | None,
        tokens: int, size: int, per_token: float, room: int,
    ) -> Run:  # fmt: skip
        return Run(
            cache=name,
            scales=scales,
            attention=str(self.model.config._attn_implementation),
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=ids,
            tokens_per_second=speed,
            cached_tokens=tokens,
            cache_bytes=size,
            bytes_per_token=per_token,
            tokens_that_fit=int(room / per_token),
        )


def compare_tokens(one: Run, other: Run) -> dict[str, int | None]:
    """Return the number of equal tokens, of all positions, and the first position that differs.

    Positions count from 0, up to the longer answer: a token without a counterpart differs.
    """
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    same = [a == b for a, b in pairs]
    positions = max(len(one.token_ids), len(other.token_ids))
    same += [False] * (positions - len(same))
    first = None if all(same) else same.index(False)
    return {"equal": sum(same), "of": positions, "first_difference": first}


def comparison_table(
    name: str, prompt: str, runs: Sequence[Run], memory: str
) -> "list[RenderableType]":
    """Return the prompt and a table with a column for each run."""
    from rich.table import Table
    from rich.text import Text

    dense, paged = runs
    tokens = compare_tokens(dense, paged)
    first = tokens["first_difference"]
    differs = "" if first is None else f", first difference at token {first + 1}"
    ratio = paged.bytes_per_token / dense.bytes_per_token
    table = Table(show_lines=True)
    table.add_column("", style="bold")
    for run in runs:
        table.add_column(run.cache, ratio=1, overflow="fold")
    table.add_row("answer", *(Text(run.text) for run in runs))
    table.add_row("same tokens", "", f"{tokens['equal']} of {tokens['of']}{differs}")
    table.add_row("scales", *(Text(run.scales) for run in runs))
    table.add_row("attention", *(run.attention for run in runs))
    table.add_row(
        "cache", *(f"{format_size(run.cache_bytes)} for {run.cached_tokens} tokens" for run in runs)
    )
    table.add_row(
        "per token",
        format_size(dense.bytes_per_token),
        f"{format_size(paged.bytes_per_token)} ({ratio:.2f} x)",
    )
    table.add_row(f"fit into {memory}", *(f"{run.tokens_that_fit:,} tokens" for run in runs))
    speeds = (run.tokens_per_second for run in runs)
    table.add_row("tokens/s", *("-" if speed is None else f"{speed:.1f}" for speed in speeds))
    return [Text.assemble((name, "bold"), ": ", prompt), table]
