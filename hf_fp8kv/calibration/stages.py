"""Stages of a calibration: each is a fold that a killed run resumes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import watched_attention
from ..errors import ConfigError
from ..formats.rotation import rotate
from .choose import ROTATED, weigh_keys
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

    def measure(index: int, k: torch.Tensor, v: torch.Tensor) -> TensorDict:
        return _measure_finite_range(job, index, k, v, partners[index])

    return _group_by_layer(fold_layers(job, "text", batches, measure, merge_ranges, observe))


def collect_sample(
    job: Job, batches: Sequence[Batch], partners: Mapping[int, Partners], name: str
) -> dict[int, TensorDict]:
    """Return the range of each layer on a sample, with the sums of `weigh_keys`.

    `name` is that of the stage; without batches there are no layers. Errors are as in
    `collect_ranges`.
    """

    def measure(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> TensorDict:
        of_layer = _measure_finite_range(job, index, k, v, partners[index])
        return of_layer | weigh_keys(k, queries)

    return _group_by_layer(fold_layers(job, name, batches, measure, merge_ranges))


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


def _group_by_layer(tensors: TensorDict) -> dict[int, TensorDict]:
    layers: dict[int, TensorDict] = {}
    for name, tensor in tensors.items():
        index, _, what = name.partition(".")
        layers.setdefault(int(index), {})[what] = tensor
    return dict(sorted(layers.items()))


def sample_near(windows: Sequence[torch.Tensor]) -> list[Batch]:
    """Return some of the windows, at their own positions."""
    return [Batch((window,)) for window in sample_windows(windows, SAMPLE_WINDOWS)]


def sample_far(windows: Sequence[torch.Tensor], beyond: Beyond) -> list[Batch]:
    """Return some of the windows at other positions; of few tokens no more than there are."""
    room = max(_FAR_PIECE, sum(map(len, windows)) // SPREAD)
    return beyond.spread([w[:room] for w in sample_windows(windows, SAMPLE_WINDOWS)], SPREAD)


def observe_queries(
    model: PreTrainedModel, batch: Batch, layers: frozenset[int], on_layer: Callable[..., None]
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


def fold_layers(
    job: Job, name: str, batches: Sequence[Batch], measure: Callable[..., TensorDict],
    merge: Callable[[TensorDict, TensorDict], TensorDict] = add_tensors,
    see: Callable[..., None] = observe_queries,
) -> TensorDict:  # fmt: skip
    """Merge the tensors that `measure` returns for each layer, as "layer.name", over batches.

    `see` calls `measure`: `observe_queries`, or `observe` without queries.
    """

    def step(merged: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}

        def on_layer(index: int, *states: Any) -> None:
            found = measure(index, *states)
            new.update({f"{index}.{what}": tensor for what, tensor in found.items()})

        see(job.model, batch, job.layers, on_layer)
        return merge(merged, new) if merged else new

    return job.run_batches(name, batches, step)
