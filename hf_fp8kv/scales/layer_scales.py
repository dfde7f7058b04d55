"""LayerScales, the static scales of one layer's K and V, and ScaleData, those of a model.

There is one direction and one unit: `real = stored * scale`, and a scale is made for E4M3FN (448 is
the largest code). Scales of other formats are converted when they are read, and when they are used.
Scales may say how a layer is stored, as a plan. With a plan they may be left to the cache, one for
each token and head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ScaleError
from ..formats import MIN_SCALE, LayerPlan, summarize_plan
from ..utils.digests import digest_of
from ..utils.text import format_list, format_value
from .report import CalibrationReport

Granularity = Literal["tensor", "head", "channel"]
# Outside of these the reciprocal, or the largest code times the scale, may leave fp32.
_LOWEST, _HIGHEST = MIN_SCALE, 1 / MIN_SCALE
# What else to do about a layer that plan or scales do not have.
KEEP_OUT = "keep the layer out with skip_layers (of a cache; serving has every layer in pages)"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_ranks(tp_rank: int, tp_size: int) -> None:
    """Raise ScaleError unless `0 <= tp_rank < tp_size`."""
    if type(tp_rank) is not int or type(tp_size) is not int or not 0 <= tp_rank < tp_size:
        raise ScaleError(
            f"expected integers with 0 <= tp_rank < tp_size, got tp_rank={tp_rank!r} and "
            f"tp_size={tp_size!r}; one process is rank 0 of 1"
        )


def scalar(value: float) -> torch.Tensor:
    """Return a number as float32 on the CPU, whatever torch's default dtype and device are."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def check_constant(value: object, what: str) -> float:
    """Return a number as a float; raise ScaleError unless it can be a scale."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared before it is converted: an integer may be too large for a float.
    if number and _LOWEST <= value <= _HIGHEST:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ScaleError(
        f"{what}: expected a finite number above 0 (from 2^-100 to 2^100), got "
        f"{format_value(value)}; calibrate again, or use dynamic scales (scales=None)"
    )


def check_tensor(tensor: object, what: str, *, is_center: bool = False) -> torch.Tensor:
    """Return a scale as float32 on the CPU, `[]` or `[heads or 1, D or 1]`, or raise ScaleError.

    A center is `[heads, D]`, and may have any finite numbers.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        got = "a tensor on meta" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ScaleError(f"{what}: expected a tensor with data, got {got}; pass one")
    if tensor.dtype not in FLOATS:
        raise ScaleError(
            f"{what}: expected float32, bfloat16, float16 or float64, got {tensor.dtype}; "
            "convert it"
        )
    values = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
    shapes, numbers, valid = "[heads, D]", "finite numbers", values.isfinite()
    if not is_center:
        values = values.reshape(()) if values.numel() == 1 else values
        shapes = "[], [heads, 1], [heads, D] or [1, D]"
        numbers += " above 0 (from 2^-100 to 2^100)"
        valid = (values >= _LOWEST) & (values <= _HIGHEST)
    if values.ndim not in ((2,) if is_center else (0, 2)) or values.numel() == 0:
        raise ScaleError(
            f"{what}: expected the shape {shapes}, got {list(values.shape)}; reshape it"
        )
    if not valid.all():
        raise ScaleError(
            f"{what}: expected {numbers}, got {values[~valid][0].item()!r}; calibrate again, or "
            "use dynamic scales (scales=None)"
        )
    return values


@dataclass(frozen=True, eq=False)
class LayerScales:
    """The scales of one layer: `real = stored * scale (+ center)`.

    Attributes:
        k: float32 on the CPU: `[]` per tensor, `[Hkv, 1]` per head, `[Hkv, Dk]` or `[1, Dk]` per
            channel. None, and `v` with it: the cache finds one for each token and head.
        v: the same for V, with Dv.
        k_center: `[Hkv, Dk]`, float32: what is subtracted from K before it is stored, or None.
        source: where the numbers are from: a file and the names of its tensors.
        plan: how the layer is stored; None: in whichever format, without rotation.

    Raises:
        ScaleError: what cannot be scales, or not together.
        ConfigError: a plan that is not a `LayerPlan`.
    """

    k: torch.Tensor | None
    v: torch.Tensor | None
    k_center: torch.Tensor | None = None
    source: str = "given"
    plan: LayerPlan | None = None

    def __post_init__(self) -> None:
        # Only a plan can do without: no scales and no plan would say nothing.
        if self.plan is None or self.k is not None or self.v is not None:
            object.__setattr__(self, "k", check_tensor(self.k, f"K scale ({self.source})"))
            object.__setattr__(self, "v", check_tensor(self.v, f"V scale ({self.source})"))
        if self.k_center is not None:
            what = f"center of K ({self.source})"
            center = check_tensor(self.k_center, what, is_center=True)
            object.__setattr__(self, "k_center", center)
        if self.plan is not None:
            LayerPlan.check(self.plan, f"plan ({self.source})")
            if self.plan.v.centered or self.plan.k.centered != (self.k_center is not None):
                got = "no center" if self.k_center is None else "a center of K"
                raise ScaleError(
                    f"scales ({self.source}): expected centers as the plan says, of K alone, got "
                    f"{got} and the plan {self.plan}; change one of them"
                )
        named = {"K": self.k, "V": self.v, "the center": self.k_center}
        heads = {n: t.shape[0] for n, t in named.items() if t is not None and t.ndim and len(t) > 1}
        if len(set(heads.values())) > 1:
            raise ScaleError(
                f"scales ({self.source}): expected one number of heads, got {heads}; "
                "give K, V and the center scales of the same layer"
            )

    @property
    def static(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of K and V; raise ScaleError where the cache finds them."""
        if self.k is None or self.v is None:
            raise ScaleError(
                f"scales ({self.source}): expected static scales, got granularity 'token', whose "
                "scales are found when a token is stored; calibrate with another granularity"
            )
        return self.k, self.v

    @property
    def granularity(self) -> Granularity | Literal["token"]:
        """The finer granularity of the two sides; "token": the cache finds the scales."""
        if self.k is None:
            return "token"
        if any(t.ndim and t.shape[1] > 1 for t in self.static):
            return "channel"
        return "head" if any(t.numel() > 1 for t in self.static) else "tensor"


@dataclass(frozen=True, eq=False, repr=False)
class ScaleData:
    """The static scales of a model, as readers return them; the attributes are `KVScales`'s."""

    layers: dict[int, LayerScales]
    format: str = "hf_fp8kv"
    model_type: str | None = None
    origin: str = "memory"
    report: CalibrationReport | None = None
    weights_digest: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise ScaleError(
                f"scales ({self.origin}): expected a dict with at least one layer, got "
                f"{self.layers!r}; use scales=None for dynamic scales"
            )
        for index, layer in self.layers.items():
            if type(index) is not int or index < 0 or not isinstance(layer, LayerScales):
                raise ScaleError(
                    f"scales ({self.origin}): expected LayerScales by layer indices from 0, got "
                    f"{type(layer).__name__} by {index!r}; pass {{0: LayerScales(...)}}"
                )
        for what, of in (("a plan", "plan"), ("static scales", "k")):
            without = [i for i, layer in self.layers.items() if getattr(layer, of) is None]
            if 0 < len(without) < len(self.layers):
                raise ScaleError(
                    f"scales ({self.origin}): expected {what} in all layers or in none, got none "
                    f"in layers {format_list(without)}; calibrate all layers at once"
                )
        object.__setattr__(self, "layers", dict(sorted(self.layers.items())))

    def __repr__(self) -> str:
        kinds = "/".join(sorted({layer.granularity for layer in self.layers.values()}))
        plan = "" if self.plan is None else f"plan=[{summarize_plan(self.plan)}], "
        return (
            f"{type(self).__name__}({len(self.layers)} layers, per {kinds}, {plan}"
            f"centered={self.centered}, format={self.format!r}, origin={self.origin!r})"
        )

    @property
    def plan(self) -> dict[int, LayerPlan] | None:
        """How each layer is stored; None: in the format that a cache is given, not rotated."""
        plans = {i: layer.plan for i, layer in self.layers.items() if layer.plan is not None}
        return plans or None

    @property
    def is_dynamic(self) -> bool:
        """Whether the cache finds a scale for each token and head; the plan and centers hold."""
        return next(iter(self.layers.values())).k is None

    @property
    def centered(self) -> bool:
        """Whether any layer carries a center of K."""
        return any(layer.k_center is not None for layer in self.layers.values())

    @property
    def digest(self) -> str:
        """SHA-256 of the shape and the bytes of every tensor and of plans, in hexadecimal."""
        return digest_of({i: (x.k, x.v, x.k_center, str(x.plan)) for i, x in self.layers.items()})
