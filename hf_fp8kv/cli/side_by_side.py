"""A prompt answered from the usual cache and from FP8 pages, side by side: `hf-fp8kv generate`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..utils.terminal import format_size

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

__all__ = ["Asker", "Run", "agreement", "comparison"]


@dataclass(frozen=True)
class Run:
    """One answer, and what its cache took; sizes in bytes, speed in tokens per second."""

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


class Asker:
    """A model with its tokenizer, and how it is asked; each answer is one `Run`."""

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
        """A temperature of 0 takes the most likely token; else the seed counts."""
        self.name, self.model, self.tokenizer, self.seed = name, model, tokenizer, seed
        self.how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        # None: what a checkpoint recommends for sampling does not count here.
        self.how |= {"temperature": temperature or None, "top_p": None, "top_k": None}

    def encode(self, text: str, chat: bool) -> Mapping[str, Any]:
        """Returns the arguments of generate() for a text, or for a user's turn of a chat."""
        if not chat:
            found = self.tokenizer(text, return_tensors="pt")
        elif self.tokenizer.chat_template is None:
            raise ConfigError(
                f"--chat expected a chat template, {self.name} has none; leave it out"
            )
        else:
            found = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True, return_tensors="pt", return_dict=True,
            )  # fmt: skip
        if found["input_ids"].shape[1] == 0:
            raise ConfigError("expected a prompt of at least one token, got an empty one")
        # Some tokenizers also return token_type_ids, which many models do not take.
        names = ("input_ids", "attention_mask")
        return {name: found[name].to(self.model.device) for name in names}

    def dense(self, inputs: Mapping[str, Any], room: int) -> Run:
        """Returns the answer from transformers' own cache, with the model's own attention."""
        from transformers import DynamicCache

        ids, speed, cache = self._ask(inputs, lambda: DynamicCache(config=self.model.config))
        tensors = [
            t for layer in cache.layers for t in vars(layer).values() if hasattr(t, "nbytes")
        ]
        size, tokens = sum(t.nbytes for t in tensors), cache.get_seq_length()
        dtype = str(self.model.dtype).removeprefix("torch.")
        return self._run(
            f"DynamicCache {dtype}", "none", ids, speed, tokens, size, size / tokens, room
        )

    def paged(
        self, inputs: Mapping[str, Any], room: int, attn: str, options: Mapping[str, Any]
    ) -> Run:
        """Returns the answer from FP8 pages, read by the attention `attn`."""
        from .. import FP8PagedCache

        try:
            self.model.set_attn_implementation(attn)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"--attn {attn} does not work with {self.name}: {error}") from error
        ids, speed, cache = self._ask(inputs, lambda: FP8PagedCache(self.model.config, **options))
        sizes, page = cache.memory_footprint(), options["page_size"]
        tokens, size = sizes["tokens"], sizes["used"] + sizes.get("other", 0)
        # The last page is partly filled: what a token takes is its share of a full one.
        share = sizes["used"] / (-(-tokens // page) * page) + sizes.get("other", 0) / tokens
        k, v = (options[side] or options["dtype"] for side in ("key_dtype", "value_dtype"))
        name = f"pages of {page}, {k}" if k == v else f"pages of {page}, K {k}, V {v}"
        scales = "none" if (k, v) == ("auto", "auto") else str(options["scales"] or "dynamic")
        return self._run(name, scales, ids, speed, tokens, size, share, room)

    def _ask(
        self, inputs: Mapping[str, Any], make: Callable[[], Any]
    ) -> tuple[list[int], float | None, Any]:
        """Returns new tokens, tokens per second after the first one, and the cache."""
        import torch

        stamps: list[float] = []

        def stamp(input_ids: "torch.Tensor", *_: Any, **__: Any) -> "torch.Tensor":
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        # Two tokens first, not counted: kernels are compiled at their first use.
        self.model.generate(
            **inputs, past_key_values=make(), max_new_tokens=2, min_new_tokens=2, do_sample=False
        )
        torch.manual_seed(self.seed)
        cache = make()
        found = self.model.generate(
            **inputs, past_key_values=cache, stopping_criteria=[stamp], **self.how
        )
        stamps = stamps[-(found.shape[1] - inputs["input_ids"].shape[1]) :]
        steps = len(stamps) - 1
        speed = steps / (stamps[-1] - stamps[0]) if steps > 0 else None
        return found[0, inputs["input_ids"].shape[1] :].tolist(), speed, cache

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


def agreement(one: Run, other: Run) -> dict[str, int | None]:
    """Returns in how many places both have the same token, and the first one that differs.

    Places count from 0. The longer answer gives their number: a token that has no partner differs.
    """
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    same = [a == b for a, b in pairs]
    places = max(len(one.token_ids), len(other.token_ids))
    same += [False] * (places - len(same))
    first = None if all(same) else same.index(False)
    return {"equal": sum(same), "of": places, "first_difference": first}


def comparison(name: str, prompt: str, runs: Sequence[Run], memory: str) -> "list[RenderableType]":
    from rich.table import Table
    from rich.text import Text

    dense, paged = runs
    found = agreement(dense, paged)
    first = found["first_difference"]
    differs = "" if first is None else f", first difference at token {first + 1}"
    less = paged.bytes_per_token / dense.bytes_per_token
    table = Table(show_lines=True)
    table.add_column("", style="bold")
    for run in runs:
        table.add_column(run.cache, ratio=1, overflow="fold")
    table.add_row("answer", *(Text(run.text) for run in runs))
    table.add_row("same tokens", "", f"{found['equal']} of {found['of']}{differs}")
    table.add_row("scales", *(Text(run.scales) for run in runs))
    table.add_row("attention", *(run.attention for run in runs))
    table.add_row(
        "cache",
        *(f"{format_size(run.cache_bytes)} for {run.cached_tokens} tokens" for run in runs),
    )
    table.add_row(
        "per token",
        format_size(dense.bytes_per_token),
        f"{format_size(paged.bytes_per_token)} ({less:.2f} x)",
    )
    table.add_row(f"fit into {memory}", *(f"{run.tokens_that_fit:,} tokens" for run in runs))
    speeds = (run.tokens_per_second for run in runs)
    table.add_row("tokens/s", *("-" if speed is None else f"{speed:.1f}" for speed in speeds))
    return [Text.assemble((name, "bold"), ": ", prompt), table]
