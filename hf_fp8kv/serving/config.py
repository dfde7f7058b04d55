"""The configuration of a model's engine, checked before any engine is made."""

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..cache.options import CacheOptions
from ..errors import ConfigError
from ..formats import LayerPlan
from ..scales.kv_scales import KVScales, resolve


class LayerStorage(NamedTuple):
    """How one layer is stored; scales and center are float32, on the device of its pages."""

    plan: LayerPlan
    k: torch.Tensor | None  # static scales, [Hkv, D]; None: dynamic, or nothing to scale
    v: torch.Tensor | None  # the same for V
    center: torch.Tensor | None  # of K, [Hkv, D]


@dataclass(frozen=True)
class ServingConfig:
    """The keywords of `enable`, parsed."""

    options: CacheOptions  # its page size is not used, since the engine has its own

    @classmethod
    def parse(
        cls,
        *,
        scales: KVScales | str | os.PathLike[str] | float | None = None,
        dtype: object = None,
        key_dtype: object = None,
        value_dtype: object = None,
        center_keys: bool | None = None,
        plan: object = None,
        backend: str = "auto",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> "ServingConfig":
        """Return the configuration. Raises ConfigError, ScaleError or BackendError."""
        options = CacheOptions.parse(
            dtype=dtype, key_dtype=key_dtype, value_dtype=value_dtype,
            scales=resolve(scales, tp_rank=tp_rank, tp_size=tp_size),
            center_keys=center_keys, plan=plan, page_size=64, max_cache_len=None, max_pages=None,
            prefill="stored", backend=backend, tp_rank=tp_rank, tp_size=tp_size,
        )  # fmt: skip
        if options.first_call_centers:
            what = "center_keys=True" if plan is None else "plan: centered"
            raise ConfigError(
                f"{what}: expected scales that carry centers, got none; the engine shares "
                "pages between requests, so a center of each request's own is not possible. Make "
                "the scales with hf_fp8kv.calibrate(center=True), or store K without centers"
            )
        return cls(options)

    def for_rank(self, tp_rank: int, tp_size: int) -> "ServingConfig":
        """Return the same configuration for the rank that an engine says it is."""
        return ServingConfig(replace(self.options, tp_rank=tp_rank, tp_size=tp_size))

    def layer_storage(
        self, count: int, heads: int, dim: int, device: torch.device | str = "cpu"
    ) -> list[LayerStorage]:
        """Return how `count` layers are stored, with the heads here.

        Raises:
            ConfigError, ScaleError: a layer that plan or scales do not have, or not like this.
        """
        self.options.check_layers(range(count), count)
        layers = []
        for index in range(count):
            scales = self.options.layer_scales(index, heads, dim, dim)
            here = (None if x is None else x.to(device) for x in scales)
            layers.append(LayerStorage(self.options.layer_plan(index), *here))
        return layers
