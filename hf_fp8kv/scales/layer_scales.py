"""LayerScales, the static scales of one layer's K and V, and ScaleData, the scales of a model.

All scales follow one convention and have one unit: `real = stored * scale`, where stored values are
E4M3FN (up to 448). Scales of other formats are converted when they are read, and when they are
used. Scales may include a storage plan of the layer. With a plan, static scales may be missing. The
cache then computes a scale for each token and head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ScaleError
from ..formats import MIN_SCALE, LayerPlan, summarize_plan
from ..utils.digests import compute_digest
from ..utils.text import format_list, format_value
from .protection import Protection

Granularity = Literal["tensor", "head", "channel"]
# Largest valid scale. From `MIN_SCALE` to it, 1 / scale and 448 * scale are finite in fp32.
_MAX_SCALE = 1 / MIN_SCALE
# Advice in errors about a layer that is missing from a plan or from scales.
SKIP_ADVICE = "exclude the layer with skip_layers (not in serving, which has every layer in pages)"
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_ranks(tp_rank: int, tp_size: int) -> None:
    """Raise ScaleError unless `0 <= tp_rank < tp_size`."""
    if type(tp_rank) is not int or type(tp_size) is not int or not 0 <= tp_rank < tp_size:
        raise ScaleError(
            f"expected integers with 0 <= tp_rank < tp_size, got tp_rank={tp_rank!r} and "
            f"tp_size={tp_size!r}. One process is rank 0 of 1"
        )


def make_scalar(value: float) -> torch.Tensor:
    """Return a number as float32 on the CPU, independent of torch's default dtype and device."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def parse_constant(value: object, label: str) -> float:
    """Return a number as a float. Raise ScaleError unless it is a valid scale."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compare before converting, because an integer may be too large for a float.
    if is_number and MIN_SCALE <= value <= _MAX_SCALE:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ScaleError(
        f"{label}: expected a finite number above 0 (from 2^-100 to 2^100), got "
        f"{format_value(value)}. Calibrate again, or use dynamic scales (scales=None)"
    )


def _parse_scale(tensor: object, label: str, *, is_center: bool = False) -> torch.Tensor:
    """Return a scale as float32 on the CPU, `[]` or `[heads or 1, D or 1]`, or raise ScaleError.

    With `is_center`, the tensor is a center, `[heads, D]`, and may have any finite values.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        got = "a tensor on meta" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ScaleError(f"{label}: expected a tensor with data, got {got}. Calibrate again")
    if tensor.dtype not in FLOAT_DTYPES:
        raise ScaleError(
            f"{label}: expected float32, bfloat16, float16 or float64, got {tensor.dtype}. "
            "Convert the tensor with .float()"
        )
    values = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
    shapes = "[heads, D]"
    rule = "finite numbers"
    is_valid = values.isfinite()
    if not is_center:
        values = values.reshape(()) if values.numel() == 1 else values
        shapes = "[], [heads, 1], [heads, D] or [1, D]"
        rule += " above 0 (from 2^-100 to 2^100)"
        is_valid = (values >= MIN_SCALE) & (values <= _MAX_SCALE)
    if values.ndim not in ((2,) if is_center else (0, 2)) or values.numel() == 0:
        raise ScaleError(
            f"{label}: expected the shape {shapes}, got {list(values.shape)}. Calibrate again"
        )
    if not is_valid.all():
        raise ScaleError(
            f"{label}: expected {rule}, got {values[~is_valid][0].item()!r}. Calibrate again, or "
            "use dynamic scales (scales=None)"
        )
    return values


@dataclass(frozen=True, eq=False)
class LayerScales:
    """The scales of one layer: `real = stored * scale (+ center)`.

    Attributes:
        k: Scale of K, float32 on the CPU: `[]` per tensor, `[Hkv, 1]` per head, `[Hkv, Dk]` or
            `[1, Dk]` per channel. None for both K and V means that the cache computes a scale for
            each token and head.
        v: Scale of V, as `k`, with Dv.
        k_center: Center that is subtracted from K before scaling, `[Hkv, Dk]`, float32, or None.
        source: Origin of the scales, such as a file and the names of its tensors.
        plan: Storage plan of the layer. None means any format without rotation.

    Raises:
        ScaleError: A scale or center is invalid, or they do not match.
        ConfigError: The plan is not a `LayerPlan`.
    """

    k: torch.Tensor | None
    v: torch.Tensor | None
    k_center: torch.Tensor | None = None
    source: str = "given"
    plan: LayerPlan | None = None

    def __post_init__(self) -> None:
        # Only layers with a plan may have no scales.
        if self.plan is None or self.k is not None or self.v is not None:
            object.__setattr__(self, "k", _parse_scale(self.k, f"K scale ({self.source})"))
            object.__setattr__(self, "v", _parse_scale(self.v, f"V scale ({self.source})"))
        if self.k_center is not None:
            center = _parse_scale(self.k_center, f"center of K ({self.source})", is_center=True)
            object.__setattr__(self, "k_center", center)
        if self.plan is not None:
            LayerPlan.check(self.plan, f"plan ({self.source})")
            if self.plan.v.centered or self.plan.k.centered != (self.k_center is not None):
                got = "no center" if self.k_center is None else "a center of K"
                raise ScaleError(
                    f"scales ({self.source}): expected a center of K if and only if the plan has "
                    f"one, and no center of V, got {got} and the plan {self.plan}. Calibrate again"
                )
        tensors = {"K": self.k, "V": self.v, "the center": self.k_center}
        head_counts = {
            name: len(tensor)
            for name, tensor in tensors.items()
            if tensor is not None and tensor.ndim and len(tensor) > 1
        }
        if len(set(head_counts.values())) > 1:
            raise ScaleError(
                f"scales ({self.source}): expected the same number of heads, got {head_counts}. "
                "Pass K, V and the center of the same layer"
            )

    @property
    def static(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of K and V. Raise ScaleError if the cache computes them."""
        if self.k is None or self.v is None:
            raise ScaleError(
                f"scales ({self.source}): expected static scales, got granularity 'token', whose "
                "scales are computed when a token is stored. Calibrate with another granularity"
            )
        return self.k, self.v

    @property
    def granularity(self) -> Granularity | Literal["token"]:
        """The finer of K's and V's granularities, or "token" if the cache computes the scales."""
        if self.k is None:
            return "token"
        if any(scale.ndim and scale.shape[1] > 1 for scale in self.static):
            return "channel"
        return "head" if any(scale.numel() > 1 for scale in self.static) else "tensor"


@dataclass(frozen=True, eq=False, repr=False)
class ScaleData:
    """The static scales of a model, as readers return them. Attributes are as in `KVScales`."""

    layers: dict[int, LayerScales]
    format: str = "hf_fp8kv"
    model_type: str | None = None
    origin: str = "memory"
    weights_digest: str | None = None
    protection: Protection | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise ScaleError(
                f"scales ({self.origin}): expected a dict with at least one layer, got "
                f"{self.layers!r}. Use scales=None for dynamic scales"
            )
        for index, layer in self.layers.items():
            if type(index) is not int or index < 0 or not isinstance(layer, LayerScales):
                raise ScaleError(
                    f"scales ({self.origin}): expected LayerScales by layer indices from 0, got "
                    f"{type(layer).__name__} by {index!r}. Pass {{0: LayerScales(...)}}"
                )
        for field, subject in {"plan": "a plan", "k": "static scales"}.items():
            missing_indices = [
                index for index, layer in self.layers.items() if getattr(layer, field) is None
            ]
            if 0 < len(missing_indices) < len(self.layers):
                raise ScaleError(
                    f"scales ({self.origin}): expected {subject} in all layers or in none, got "
                    f"none in layers {format_list(missing_indices)}. Calibrate all layers at once"
                )
        object.__setattr__(self, "layers", dict(sorted(self.layers.items())))

    def __repr__(self) -> str:
        plan = "" if self.plan is None else f"plan=[{summarize_plan(self.plan)}], "
        return (
            f"{type(self).__name__}({len(self.layers)} layers, per {self.granularity}, {plan}"
            f"centered={self.centered}, format={self.format!r}, origin={self.origin!r})"
        )

    @property
    def granularity(self) -> str:
        """The granularities of the layers, joined by "/" if they differ."""
        return "/".join(sorted({layer.granularity for layer in self.layers.values()}))

    @property
    def plan(self) -> dict[int, LayerPlan] | None:
        """Storage plan of each layer. None means the format of the cache, without rotation."""
        return {
            index: layer.plan for index, layer in self.layers.items() if layer.plan is not None
        } or None

    @property
    def is_dynamic(self) -> bool:
        """Whether the cache computes the scales. The plan and the centers apply in both cases."""
        return next(iter(self.layers.values())).k is None

    @property
    def centered(self) -> bool:
        """Whether any layer has a center of K."""
        return any(layer.k_center is not None for layer in self.layers.values())

    @property
    def digest(self) -> str:
        """SHA-256 of the shape and the bytes of every tensor and of plans, in hexadecimal."""
        return compute_digest(
            {
                index: (layer.k, layer.v, layer.k_center, str(layer.plan))
                for index, layer in self.layers.items()
            }
        )
