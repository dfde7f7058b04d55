"""The stages that make scales: each is a fold that a killed run goes on with."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import watched_attention
from ..errors import ConfigError
from .choose import Choice, Queries, chosen_scales, costs, trials
from .job import Job, Options
from .observe import Batch, Parts, merged, observe, range_of
from .pairs import TOKENS, Partners, measure_pairs

__all__ = ["SAMPLE_WINDOWS", "chosen", "observed", "pairs", "spread"]

# Windows on which scales are tried, and queries of each.
SAMPLE_WINDOWS = 8
_QUERIES = 64


def pairs(job: Job, window: torch.Tensor) -> dict[int, Partners]:
    """Which channels each layer rotates together."""

    def work() -> Parts:
        found = measure_pairs(job.model, window, job.layers)
        job.told("pairs", 2 * min(TOKENS, len(window)), False)
        return {
            f"{index}.{side}": partner
            for index, of in found.items()
            for side, partner in (("k", of.k), ("v", of.v))
            if partner is not None
        }

    parts = job.once("pairs", work)
    return {i: Partners(parts.get(f"{i}.k"), parts.get(f"{i}.v")) for i in job.layers}


def observed(
    job: Job, name: str, batches: Sequence[Batch], partners: Mapping[int, Partners]
) -> dict[int, Parts]:
    """The range of K and V of each layer over all batches.

    Raises:
        ConfigError: a layer held NaN or infinity.
    """

    def step(parts: Parts, batch: Batch) -> Parts:
        new: Parts = {}

        def seen(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            found = range_of(k, v, partners[index].k, partners[index].v)
            _check_finite(index, found)
            new.update({f"{index}.{name}": part for name, part in found.items()})

        observe(job.model, batch, job.layers, seen)
        return merged(parts, new) if parts else new

    return _by_layer(job.over(name, batches, step))


def _check_finite(index: int, parts: Parts) -> None:
    for side in "kv":
        if not torch.isfinite(parts[f"{side}_pair"]).all():
            raise ConfigError(
                f"layer {index}: expected finite {side.upper()}, got NaN or infinity; load the "
                "model in bfloat16 or float32, and look at the text"
            )


def _by_layer(parts: Parts) -> dict[int, Parts]:
    found: dict[int, Parts] = {}
    for name, part in parts.items():
        index, _, what = name.partition(".")
        found.setdefault(int(index), {})[what] = part
    return dict(sorted(found.items()))


def chosen(
    job: Job,
    windows: Sequence[torch.Tensor],
    ranges: Mapping[int, Parts],
    partners: Mapping[int, Partners],
    options: Options,
) -> dict[int, Choice]:
    """The scales of each layer, with and without centers, tried on some of the windows."""
    tried = {
        index: trials(
            parts, partners[index], granularity=options.granularity, fmt=options.fmt,
            margin=options.margin, center=options.center,
        )
        for index, parts in ranges.items()
    }  # fmt: skip

    def step(parts: Parts, batch: Batch) -> Parts:
        new: Parts = {}
        stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def seen(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            stored[index] = (k, v)

        def count(index: int, queries: Queries | None) -> None:
            k, v = stored.pop(index)
            for name, trial in tried[index].items():
                x = v if trial.side == "v" else k
                found = costs(trial, x, queries, options.fmt)
                new.update({f"{index}.{name}.{what}": part for what, part in found.items()})

        def saw(index: int, query: torch.Tensor, *_: Any, more: dict[str, Any]) -> None:
            if index in stored:
                count(index, _queries(query, stored[index][0], more))

        with _watched(job.model, lambda i, q, k, v, more: saw(i, q, more=more)):
            observe(job.model, batch, job.layers, seen)
        for index in sorted(stored):  # those whose attention does not show its queries
            count(index, None)
        return {name: parts[name] + part for name, part in new.items()} if parts else new

    batches = [Batch((window,)) for window in spread(windows, SAMPLE_WINDOWS)]

    def work() -> Parts:
        parts = job.over("scales", batches, step)
        found: Parts = {}
        for index, of in tried.items():
            cost = {
                name: {what: parts[f"{index}.{name}.{what}"] for what in ("cost", "room")}
                for name in of
            }
            chosen = chosen_scales(of, cost, options.fmt)
            found |= {f"{index}.{name}": part for name, part in chosen.parts.items()}
        return found

    found = _by_layer(job.once("chosen", work))
    job.state.drop("scales")  # which is large, and not needed again
    return {index: Choice.of(parts) for index, parts in found.items()}


def _watched(model: PreTrainedModel, saw: Any) -> AbstractContextManager[None]:
    """Shows queries where the model looks its attention up and its K are those of the text."""
    if model.config.is_encoder_decoder or not model._can_set_attn_implementation():
        return nullcontext()
    return watched_attention(model, saw)


def _queries(query: torch.Tensor, k: torch.Tensor, more: dict[str, Any]) -> Queries | None:
    """Some of the queries `[1, Hq, N, D]` of one window, from all over its last three quarters."""
    tokens = query.shape[2]
    if query.shape[0] != 1 or tokens != len(k):
        return None
    at = torch.linspace(tokens // 4, tokens - 1, min(_QUERIES, tokens)).long()
    scaling = more.get("scaling")
    window = more.get("sliding_window")
    return Queries.of(
        query[0, :, at.to(query.device)].to(k.device), k, at.to(k.device),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        None if window is None else int(window),
    )  # fmt: skip


def spread(windows: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Some of the windows, from all over the list: of every length."""
    return list(windows[:: max(1, len(windows) // count)][:count])
