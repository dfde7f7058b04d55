"""ScaleData: the static scales of a model as a value, which readers return and writers take."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ScaleError
from .layer_scales import LayerScales
from .report import CalibrationReport


@dataclass(frozen=True, eq=False, repr=False)
class ScaleData:
    """The static scales of a model; the attributes are those of `KVScales`."""

    layers: dict[int, LayerScales]
    format: str = "hf_fp8kv"
    model_type: str | None = None
    origin: str = "memory"
    report: CalibrationReport | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise ScaleError(
                f"scales ({self.origin}): expected a dict with at least one layer, got "
                f"{self.layers!r}; use scales=None for dynamic scales"
            )
        for index, layer in self.layers.items():
            if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                raise ScaleError(
                    f"scales ({self.origin}): expected layer indices from 0, got {index!r}"
                )
            if not isinstance(layer, LayerScales):
                raise ScaleError(
                    f"scales ({self.origin}): expected LayerScales for layer {index}, got "
                    f"{type(layer).__name__}"
                )
        object.__setattr__(self, "layers", dict(sorted(self.layers.items())))

    def __repr__(self) -> str:
        kinds = "/".join(sorted({layer.granularity for layer in self.layers.values()}))
        return (
            f"{type(self).__name__}({len(self.layers)} layers, per {kinds}, "
            f"centered={self.centered}, format={self.format!r}, origin={self.origin!r})"
        )

    @property
    def centered(self) -> bool:
        """Whether any layer carries a center of K."""
        return any(layer.k_center is not None for layer in self.layers.values())

    @property
    def digest(self) -> str:
        """SHA-256 of the shape and the bytes of every tensor, in hexadecimal."""
        digest = hashlib.sha256()
        for index, layer in self.layers.items():
            for name in ("k", "v", "k_center"):
                tensor = getattr(layer, name)
                if tensor is not None:
                    digest.update(f"{index}.{name}{list(tensor.shape)}".encode())
                    digest.update(tensor.numpy().astype("<f4").tobytes())
        return digest.hexdigest()


def take_rank(
    layers: Mapping[int, LayerScales], tp_rank: int, tp_size: int
) -> Mapping[int, LayerScales]:
    """Return one rank's part of layers that have a number for each rank, `[tp_size, 1]`."""
    if tp_size == 1:
        return layers
    return {
        index: LayerScales(layer.k[tp_rank, 0], layer.v[tp_rank, 0], source=layer.source)
        for index, layer in layers.items()
    }
