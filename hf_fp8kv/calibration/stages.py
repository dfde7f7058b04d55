"""The stages of a calibration. Each stage reads windows and merges tensors by layer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..formats import Format, LayerPlan
from ..formats.rotation import rotate
from ..scales.layer_scales import Granularity
from .observe import ROTATED, Batch, TensorDict, measure_range, merge_tensors, nan_error, observe
from .queries import Queries, observe_queries
from .rope import NUM_FAR_POSITIONS, FarPositions, Partners

# Maximum number of windows on which candidates are compared.
MAX_SAMPLE_WINDOWS = 8
# Minimum number of tokens that are kept of a window at a far position.
_MIN_FAR_TOKENS = 16


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of `calibrate` that determine the scales.

    `plan` is the plan of each layer, "measured" for the plan of least cost, or None for `fmt`.
    With `is_latent`, layers store latents and a RoPE part (MLA). They have no centers, and the
    RoPE part keeps 16 bits in a plan.
    """

    granularity: Granularity
    fmt: Format
    margin: float
    center: bool
    plan: Mapping[int, LayerPlan] | Literal["measured"] | None = None
    is_latent: bool = False


@dataclass(frozen=True)
class Job:
    """The inputs of all stages: a model in eval mode, the layers to scale, and a progress bar."""

    model: PreTrainedModel
    layers: frozenset[int]
    options: CalibrationOptions
    bar: "tqdm[Any]"
    start_time: float = field(default_factory=time.monotonic)

    def start_stage(self, stage: str, num_tokens: int) -> None:
        """Restart the progress bar for a stage of `num_tokens` tokens."""
        self.bar.set_description(stage, refresh=False)
        self.bar.reset(num_tokens)


def fold_layers(
    job: Job, stage: str, batches: Sequence[Batch], measure: Callable[..., TensorDict],
    observer: Callable[..., None] = observe_queries,
) -> dict[int, TensorDict]:  # fmt: skip
    """Run the model on all batches, and merge the tensors that `measure` returns for each layer.

    The observer is `observe`, or `observe_queries`, which also passes queries to `measure`.
    """
    totals: dict[int, TensorDict] = {}

    def on_layer(index: int, *states: Any) -> None:
        tensors = measure(index, *states)
        totals[index] = merge_tensors(totals[index], tensors) if index in totals else tensors

    job.start_stage(stage, sum(batch.num_tokens for batch in batches))
    for batch in batches:
        observer(job.model, batch, job.layers, on_layer)
        job.bar.update(batch.num_tokens)
    return dict(sorted(totals.items()))


def collect_ranges(
    job: Job, stage: str, batches: Sequence[Batch], partners: Mapping[int, Partners],
    observer: Callable[..., None] = observe,
) -> dict[int, TensorDict]:  # fmt: skip
    """Return the ranges of K and V by layer, and the sums of `weigh_keys` if there are queries.

    Raises:
        ConfigError: K or V has NaN or infinity, or a layer has no V.
    """

    def measure(
        index: int, k: torch.Tensor, v: torch.Tensor, *queries: Queries | None
    ) -> TensorDict:
        if not v.shape[-1]:
            raise ConfigError(
                f"layer {index}: expected keys and values, got latents without a RoPE part, so "
                "there is no V. Use dynamic scales (scales=None), which work for every layer"
            )
        statistics = measure_range(k, v, partners[index].k, partners[index].v)
        for side in "kv":
            if not torch.isfinite(statistics[f"{side}_pair_norm"]).all():
                raise nan_error(index, side.upper())
        if job.options.plan is not None:
            rotated_ranges = measure_range(rotate(k), rotate(v), None, None)
            statistics |= {ROTATED + name: x for name, x in rotated_ranges.items()}
        return statistics | (weigh_keys(k, *queries) if queries else {})

    return fold_layers(job, stage, batches, measure, observer)


def weigh_keys(k: torch.Tensor, queries: Queries | None) -> TensorDict:
    """Return sums of K `[N, Hkv, Dk]` for `find_centers`, each `[Hkv, Dk]`, float64 on the CPU.

    In `weighted_sum`, each value is weighted by the expected cost of its squared error, if errors
    are independent. `weight_sum` is the sum of the weights. Without queries all weights are 1.
    """
    weights = torch.ones_like(k, dtype=torch.float32)
    if queries is not None:
        derivative = queries.weights * (1 - queries.weights)
        weights = torch.einsum("hqn,hqd->nhd", derivative, queries.q.square())
    sums = {"weight_sum": weights, "weighted_sum": weights * k.float()}
    return {name: x.sum(0, dtype=torch.float64).cpu() for name, x in sums.items()}


def sample_windows(windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return at most `MAX_SAMPLE_WINDOWS` windows, evenly spaced in a list sorted by length."""
    return list(windows[:: max(1, len(windows) // MAX_SAMPLE_WINDOWS)][:MAX_SAMPLE_WINDOWS])


def sample_far_windows(windows: Sequence[torch.Tensor], positions: FarPositions) -> list[Batch]:
    """Return windows at far positions, which together are about as long as `windows`."""
    length = max(_MIN_FAR_TOKENS, sum(map(len, windows)) // NUM_FAR_POSITIONS)
    return positions.place([w[:length] for w in sample_windows(windows)], NUM_FAR_POSITIONS)
