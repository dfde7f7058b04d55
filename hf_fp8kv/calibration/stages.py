"""Stages of a calibration: each is a fold that a killed run resumes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import watched_attention
from ..errors import ConfigError
from .choose import Choice, Queries, make_trials, measure_costs, measure_key_cost, pick_scales
from .observe import Batch, TensorDict, add_tensors, measure_range, merge_ranges, observe
from .pairs import TOKENS, Partners, measure_partners
from .positions import SPREAD, Beyond
from .state import Job

# Windows on which scales are tried, and queries of each.
SAMPLE_WINDOWS = 8
_QUERIES = 64
# The shortest piece of a window that is read at another position.
_FAR_PIECE = 16
_Asked = Queries | None


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
    job: Job, batches: Sequence[Batch], partners: Mapping[int, Partners], name: str = "text"
) -> dict[int, TensorDict]:
    """Return the range of K and V of each layer; raise ConfigError for NaN or infinity.

    `name` is that of the stage; without batches there are no layers.
    """

    def step(ranges: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def on_states(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            of_layer = measure_range(k, v, partners[index].k, partners[index].v)
            _check_finite(index, of_layer)
            new.update({f"{index}.{name}": tensor for name, tensor in of_layer.items()})

        observe(job.model, batch, job.layers, on_states)
        return merge_ranges(ranges, new) if ranges else new

    return _group_by_layer(job.run_batches(name, batches, step))


def _check_finite(index: int, of_layer: TensorDict) -> None:
    for side in "kv":
        if not torch.isfinite(of_layer[f"{side}_pair"]).all():
            raise ConfigError(
                f"layer {index}: expected finite {side.upper()}, got NaN or infinity; load the "
                "model in bfloat16 or float32, and look at the text"
            )


def _group_by_layer(tensors: TensorDict) -> dict[int, TensorDict]:
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
    far: Mapping[int, TensorDict] | None = None,
) -> dict[int, Choice]:
    """Return the scales of each layer, with and without centers, tried on some of the windows.

    `far` is the range of each layer at other positions, where it is known.
    """
    fmt, far = job.options.fmt, far or {}
    trials = {i: make_trials(of, partners[i], job.options, far.get(i)) for i, of in ranges.items()}

    def step(costs: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def add_costs(index: int, k: torch.Tensor, v: torch.Tensor, queries: _Asked) -> None:
            for name, trial in trials[index].items():
                x = v if trial.side == "v" else k
                of_trial = measure_costs(trial, x, queries, fmt)
                new.update({f"{index}.{name}.{what}": cost for what, cost in of_trial.items()})

        _observe_queries(job, batch, add_costs)
        return add_tensors(costs, new)

    def work() -> TensorDict:
        batches = [Batch((window,)) for window in sample_windows(windows, SAMPLE_WINDOWS)]
        sums = job.run_batches("scales", batches, step)
        chosen: TensorDict = {}
        for index, of_layer in trials.items():
            costs = {
                name: {what: sums[f"{index}.{name}.{what}"] for what in ("cost", "room")}
                for name in of_layer
            }
            choice = pick_scales(of_layer, costs, fmt)
            chosen |= {f"{index}.{name}": tensor for name, tensor in choice.tensors.items()}
        return chosen

    chosen = _group_by_layer(job.run_once("chosen", work))
    job.state.drop("scales")  # which is large, and not needed again
    return {index: Choice.from_tensors(tensors) for index, tensors in chosen.items()}


def check_centers(
    job: Job, batches: Sequence[Batch], choices: Mapping[int, Choice]
) -> dict[int, Choice]:
    """Return the choices with what the centers gain at other positions, where that is less."""

    def step(costs: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def add_costs(index: int, k: torch.Tensor, v: torch.Tensor, queries: _Asked) -> None:
            choice = choices[index]
            new[str(index)] = torch.stack([
                measure_key_cost(scales, k, queries, job.options.fmt)
                for scales in (choice.plain, choice.centered)
            ])  # fmt: skip

        _observe_queries(job, batch, add_costs)
        return add_tensors(costs, new)

    checked = dict(choices)
    for name, costs in job.run_batches("far centers", batches, step).items():
        choice = choices[int(name)]
        plain, centered = costs.tolist()
        gain = plain / centered if centered > 0 else 1.0
        checked[int(name)] = replace(choice, gain=min(choice.gain or gain, gain))
    return checked


def sample_far(windows: Sequence[torch.Tensor], beyond: Beyond) -> list[Batch]:
    """Return some of the windows at other positions; of few tokens no more than there are."""
    room = max(_FAR_PIECE, sum(map(len, windows)) // SPREAD)
    return beyond.spread([w[:room] for w in sample_windows(windows, SAMPLE_WINDOWS)], SPREAD)


def _observe_queries(job: Job, batch: Batch, on_layer: Callable[..., None]) -> None:
    """Call the model, and `on_layer` with a layer's index, K, V and its queries, if it has any."""
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_states(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        states[index] = (k, v)

    def on_attention(
        index: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: dict[str, Any]
    ) -> None:
        if index in states:
            k, v = states.pop(index)
            on_layer(index, k, v, _sample_queries(query, k, call))

    with _watch(job.model, on_attention):
        observe(job.model, batch, job.layers, on_states)
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
    positions = torch.linspace(tokens // 4, tokens - 1, min(_QUERIES, tokens)).long()
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
