"""What a user chose for a model's engine, checked before any engine is made."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..cache.options import CacheOptions
from ..errors import ConfigError
from ..formats import AUTO
from ..scales.kv_scales import KVScales
from ..scales.resolve import resolve

__all__ = ["LayerNumbers", "ServingConfig"]


@dataclass(frozen=True)
class LayerNumbers:
    """The static numbers of one layer, on the device of its pages.

    Attributes:
        k_static_scale: `[Hkv, D]`, float32, or None: dynamic, or nothing to scale.
        v_static_scale: the same for V.
        k_center: `[Hkv, D]`, float32, or None.
    """

    k_static_scale: torch.Tensor | None
    v_static_scale: torch.Tensor | None
    k_center: torch.Tensor | None


@dataclass(frozen=True)
class ServingConfig:
    """The keywords of `enable`, parsed.

    Attributes:
        options: as a cache has them; its page size means nothing here, the engine has its own.
    """

    options: CacheOptions

    @classmethod
    def parse(
        cls,
        *,
        scales: KVScales | str | os.PathLike[str] | float | None = None,
        dtype: object = "fp8_e4m3",
        key_dtype: object = None,
        value_dtype: object = None,
        center_keys: bool | None = None,
        backend: str = "auto",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> "ServingConfig":
        """Returns the settings. Raises ConfigError, ScaleError or BackendError."""
        options = CacheOptions.parse(
            dtype=dtype, key_dtype=key_dtype, value_dtype=value_dtype,
            scales=resolve(scales, tp_rank=tp_rank, tp_size=tp_size),
            center_keys=center_keys, page_size=64, max_cache_len=None, max_pages=None,
            prefill="stored", backend=backend, tp_rank=tp_rank, tp_size=tp_size,
        )  # fmt: skip
        if options.first_call_centers:
            raise ConfigError(
                "center_keys=True: expected scales that carry centers, got none; the engine shares "
                "pages between requests, so a center of each request's own is not possible. Make "
                "the scales with hf_fp8kv.calibrate(center=True), or leave center_keys out"
            )
        return cls(options)

    def for_ranks(self, tp_rank: int, tp_size: int) -> "ServingConfig":
        """The same settings for the rank that an engine says it is."""
        return ServingConfig(replace(self.options, tp_rank=tp_rank, tp_size=tp_size))

    def layers(
        self, count: int, heads: int, dim: int, device: torch.device | str = "cpu"
    ) -> list[LayerNumbers]:
        """Returns the static numbers of every layer. Raises ScaleError.

        Args:
            count: layers of the model.
            heads: KV heads in this process.
            dim: head size, of K and of V.
            device: where to.
        """

        def on(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        found = (self.options.layer_scales(index, heads, dim, dim) for index in range(count))
        return [LayerNumbers(*map(on, numbers)) for numbers in found]

    def describe(self) -> dict[str, Any]:
        """Returns the choice in words, for logs and reports."""
        o = self.options
        if o.key_format == o.value_format == AUTO:
            kind = "none"
        elif o.scales is None:
            kind = "dynamic, per token and head"
        else:
            kind = "static" if isinstance(o.scales, KVScales) else f"constant {o.scales}"
        return {"key_dtype": o.key_format, "value_dtype": o.value_format, "scales": kind}
