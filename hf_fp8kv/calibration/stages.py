"""Stages of a calibration: each is a fold that a killed run resumes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import watched_attention
from ..errors import ConfigError
from ..formats import Format
from ..formats.rotation import rotate
from .choose import (
    CENTERED,
    ROTATED,
    Choice,
    Trial,
    make_trials,
    measure_costs,
    measure_key_cost,
    pick_scales,
    weigh_keys,
)
from .observe import Batch, TensorDict, add_tensors, measure_range, merge_ranges, observe
from .pairs import TOKENS, Partners, measure_partners
from .positions import SPREAD, Beyond
from .queries import Queries
from .state import Job

# Windows on which scales are tried, and queries of each.
SAMPLE_WINDOWS = 8
_QUERIES = 64
# The shortest piece of a window that is read at another position.
_FAR_PIECE = 16
Asked = Queries | None


def find_partners(job: Job, window: torch.Tensor) -> dict[int, Partners]:
    """Return which channels each layer rotates together, measured on a window of token ids."""

    def work() -> TensorDict:
        partners = measure_partners(job.model, window, job.layers)
        job.on_progress("pairs", 2 * min(TOKENS, len(window)), False)
        return {
            f"{index}.{side}": channels
            for index, of_layer in partners.items()
            for side, channels in (("k", of_layer.k), ("v", of_layer.v))
            if channels is not None
        }

    tensors = job.run_once("pairs", work)
    return {i: Partners(tensors.get(f"{i}.k"), tensors.get(f"{i}.v")) for i in job.layers}


def collect_ranges(
    job: Job, batches: Sequence[Batch], partners: Mapping[int, Partners]
) -> dict[int, TensorDict]:
    """Return the range of K and V of each layer; raise ConfigError for NaN or infinity."""

    def step(ranges: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def on_states(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            of_layer = _measure_finite_range(job, index, k, v, partners[index])
            new.update({f"{index}.{name}": tensor for name, tensor in of_layer.items()})

        observe(job.model, batch, job.layers, on_states)
        return merge_ranges(ranges, new) if ranges else new

    return group_by_layer(job.run_batches("text", batches, step))


def collect_sample(
    job: Job, batches: Sequence[Batch], partners: Mapping[int, Partners], name: str
) -> dict[int, TensorDict]:
    """Return the range of each layer on a sample, with the sums of `weigh_keys`.

    `name` is that of the stage; without batches there are no layers. Errors are as in
    `collect_ranges`.
    """

    def step(sample: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def on_layer(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> None:
            of_layer = _measure_finite_range(job, index, k, v, partners[index])
            of_layer |= weigh_keys(k, queries)
            new.update({f"{index}.{name}": tensor for name, tensor in of_layer.items()})

        observe_queries(job.model, job.layers, batch, on_layer)
        return merge_ranges(sample, new) if sample else new

    return group_by_layer(job.run_batches(name, batches, step))


def _measure_finite_range(
    job: Job, index: int, k: torch.Tensor, v: torch.Tensor, partners: Partners
) -> TensorDict:
    if not v.shape[-1]:
        raise ConfigError(
            f"layer {index}: expected keys and values, got latents without positions, of which "
            "nothing is V; leave scales out: dynamic ones are right for every layer"
        )
    of_layer = measure_range(k, v, partners.k, partners.v)
    _check_finite(index, of_layer)
    if job.options.plan is not None:
        rotated = measure_range(rotate(k), rotate(v), None, None)
        of_layer |= {f"{ROTATED}{name}": tensor for name, tensor in rotated.items()}
    return of_layer


def _check_finite(index: int, of_layer: TensorDict) -> None:
    for side in "kv":
        if not torch.isfinite(of_layer[f"{side}_pair"]).all():
            raise ConfigError(
                f"layer {index}: expected finite {side.upper()}, got NaN or infinity; load the "
                "model in bfloat16 or float32, and look at the text"
            )


def group_by_layer(tensors: TensorDict) -> dict[int, TensorDict]:
    layers: dict[int, TensorDict] = {}
    for name, tensor in tensors.items():
        index, _, what = name.partition(".")
        layers.setdefault(int(index), {})[what] = tensor
    return dict(sorted(layers.items()))


def choose_scales(
    job: Job,
    windows: Sequence[torch.Tensor],
    ranges: Mapping[int, TensorDict],
    partners: Mapping[int, Partners],
    near: Mapping[int, TensorDict] | None = None,
    far: Mapping[int, TensorDict] | None = None,
) -> dict[int, tuple[Choice, ...]]:
    """Return the scales of each layer, with and without centers, tried on some of the windows.

    `near` and `far` are those of `collect_sample`, see `make_trials`. Where several centers are to
    be tried at other positions, there is a choice with each.
    """
    fmt, near, far = job.options.fmt, near or {}, far or {}
    trials = {
        index: make_trials(of, partners[index], job.options, near.get(index), far.get(index))
        for index, of in ranges.items()
    }

    def work() -> TensorDict:
        sums = sum_costs(job, windows, trials, lambda index, name: fmt)
        chosen: TensorDict = {}
        for index, of_layer in trials.items():
            costs = {
                name: {what: sums[f"{index}.{name}.{what}"] for what in ("cost", "room")}
                for name in of_layer
            }
            picked = [pick_scales(of_layer, costs, fmt)]
            others = [name for name in CENTERED[1:] if name in of_layer]
            picked += [pick_scales(of_layer, costs, fmt, name) for name in others]
            for number, choice in enumerate(picked):
                chosen |= {f"{index}.{number}.{name}": t for name, t in choice.tensors.items()}
        return chosen

    chosen = group_by_layer(job.run_once("chosen", work))
    job.state.drop("scales")  # which is large, and not needed again
    return {
        index: tuple(map(Choice.from_tensors, group_by_layer(tensors).values()))
        for index, tensors in chosen.items()
    }


def sum_costs(
    job: Job,
    windows: Sequence[torch.Tensor],
    trials: Mapping[int, Mapping[str, Trial]],
    format_of: Callable[[int, str], Format],
) -> TensorDict:
    """Return the costs of each layer's trials on some windows, as "layer.trial.cost" and "room".

    `format_of` gives that of a layer's trial. The stage is called "scales".
    """

    def step(costs: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def add_costs(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> None:
            for name, trial in trials[index].items():
                x = v if trial.side == "v" else k
                of_trial = measure_costs(trial, x, queries, format_of(index, name))
                new.update({f"{index}.{name}.{what}": cost for what, cost in of_trial.items()})

        observe_queries(job.model, job.layers, batch, add_costs)
        return add_tensors(costs, new)

    return job.run_batches("scales", sample_near(windows), step)


def check_centers(
    job: Job, batches: Sequence[Batch], choices: Mapping[int, tuple[Choice, ...]]
) -> dict[int, Choice]:
    """Return the choice of each layer whose center holds best.

    Its gain is that at other positions, where that is less.
    """

    def step(costs: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def add_costs(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> None:
            of_layer = choices[index]
            new[str(index)] = torch.stack([
                measure_key_cost(scales, k, queries, job.options.fmt)
                for scales in (of_layer[0].plain, *(choice.centered for choice in of_layer))
            ])  # fmt: skip

        observe_queries(job.model, job.layers, batch, add_costs)
        return add_tensors(costs, new)

    checked = {index: of_layer[0] for index, of_layer in choices.items()}
    for name, costs in job.run_batches("far centers", batches, step).items():
        plain, *centered = costs.tolist()
        gains = [plain / cost if cost > 0 else 1.0 for cost in centered]
        held = [
            replace(choice, gain=min(choice.gain or gain, gain))
            for choice, gain in zip(choices[int(name)], gains, strict=True)
        ]
        checked[int(name)] = max(held, key=lambda choice: choice.gain or 0.0)
    return checked


def sample_near(windows: Sequence[torch.Tensor]) -> list[Batch]:
    """Return some of the windows, at their own positions."""
    return [Batch((window,)) for window in sample_windows(windows, SAMPLE_WINDOWS)]


def sample_far(windows: Sequence[torch.Tensor], beyond: Beyond) -> list[Batch]:
    """Return some of the windows at other positions; of few tokens no more than there are."""
    room = max(_FAR_PIECE, sum(map(len, windows)) // SPREAD)
    return beyond.spread([w[:room] for w in sample_windows(windows, SAMPLE_WINDOWS)], SPREAD)


def observe_queries(
    model: PreTrainedModel, layers: frozenset[int], batch: Batch, on_layer: Callable[..., None]
) -> None:
    """Call the model, and `on_layer` with a layer's index, K, V and its queries, if it has any."""
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_states(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        states[index] = (k, v)

    def on_attention(
        module: Any, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: dict[str, Any]
    ) -> None:
        index = module.layer_idx
        if index in states:
            k, v = states.pop(index)
            on_layer(index, k, v, _sample_queries(query, k, call))

    with _watch(model, on_attention):
        observe(model, batch, layers, on_states)
    for index in sorted(states):  # those whose attention does not show its queries
        on_layer(index, *states[index], None)


def _watch(
    model: PreTrainedModel, on_attention: Callable[..., None]
) -> AbstractContextManager[None]:
    """Show queries where the model looks its attention up and its K are those of the text."""
    if model.config.is_encoder_decoder or not model._can_set_attn_implementation():
        return nullcontext()
    return watched_attention(model, on_attention)


def _sample_queries(query: torch.Tensor, k: torch.Tensor, call: dict[str, Any]) -> Queries | None:
    """Return some queries of one window, `[1, Hq, N, D]`, from all over its last three quarters."""
    tokens = query.shape[2]
    if query.shape[0] != 1 or tokens != len(k):
        return None
    positions = torch.linspace(tokens // 4, tokens - 1, min(_QUERIES, tokens), device="cpu").long()
    scaling = call.get("scaling")
    window = call.get("sliding_window")
    return Queries.from_states(
        query[0, :, positions.to(query.device)].to(k.device), k, positions.to(k.device),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        None if window is None else int(window),
    )  # fmt: skip


def sample_windows(windows: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return some of the windows, from all over the list: of every length."""
    return list(windows[:: max(1, len(windows) // count)][:count])
