"""How each layer is stored, from what vLLM was started with; checked before anything is served.

Scales are named in vLLM's own configuration, which reaches every process of every machine, as
environment variables do not:

    --additional-config '{"hf_fp8kv": {"scales": "path/or/hub-id"}}'
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..errors import ConfigError, ScaleError
from ..scales.kv_scales import KVScales
from ..serving.config import LayerStorage, ServingConfig
from .dtypes import CacheDType, find_dtype

_KEY = "hf_fp8kv"
_OPTIONS = ("scales", "backend")


@dataclass(frozen=True)
class ModelStorage:
    """How the layers of a model are stored, in one tensor-parallel rank."""

    config: ServingConfig
    dtype: CacheDType

    @property
    def backend(self) -> str:
        """What a user said of the backend of the operations."""
        return self.config.options.backend

    def check_layers(self, indices: Iterable[int], count: int, model_type: str | None) -> None:
        """Raise ScaleError for scales that cannot be those of a model.

        Args:
            indices: the layers that are here.
            count: the model's layers.
            model_type: as transformers names it.
        """
        scales = self.config.options.scales
        self.config.options.check_layers(list(indices), count)
        if not isinstance(scales, KVScales):
            return
        if more := [index for index in scales.layers if index >= count]:
            raise ScaleError(
                f"scales ({scales.origin}): expected layers from 0 to {count - 1}, which the model "
                f"has, got {more}, too; use the scales of this very model"
            )
        if None not in (scales.model_type, model_type) and scales.model_type != model_type:
            raise ScaleError(
                f"scales ({scales.origin}): expected scales of a {model_type!r} model, got "
                f"{scales.model_type!r}; use the scales of this very model"
            )

    def layer(self, index: int, heads: int, dim: int, device: torch.device) -> LayerStorage:
        """Return how a layer is stored, with the KV heads of this rank.

        Raises:
            ScaleError: scales of other heads, another head size or other layers.
            ConfigError: a plan that keeps K or V in 16 bits.
        """
        options = self.config.options
        plan = options.layer_plan(index)
        if any(side.is_auto for side in plan):
            raise ConfigError(
                f"plan: expected 8 bits for K and V, since all tokens have {self.dtype.name}'s "
                f"bytes, got {plan} for layer {index}; calibrate without 'auto', or keep whole "
                "layers out with vLLM's --kv-cache-dtype-skip-layers"
            )
        scales = options.layer_scales(index, heads, dim, dim)
        return LayerStorage(plan, *(None if x is None else x.to(device) for x in scales))


def read_storage(
    dtype: str, additional_config: object, checkpoint: str, rank: int, size: int
) -> ModelStorage:
    """Return how a model is stored.

    Args:
        dtype: of `--kv-cache-dtype`.
        additional_config: vLLM's own, a dict.
        checkpoint: where the model is: static scales are looked for there if none are named.
        rank: of this process among the tensor-parallel ones.
        size: how many these are.

    Raises:
        ConfigError, ScaleError: something that cannot be, or not together.
    """
    given = additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping) or set(given) - set(_OPTIONS):
        raise ConfigError(
            f"--additional-config {_KEY}: expected a dict of {' and '.join(_OPTIONS)}, got "
            f"{given!r}; leave the rest out"
        )
    return _read(dtype, given.get("scales"), given.get("backend", "auto"), checkpoint, rank, size)


@functools.lru_cache(maxsize=8)
def _read(
    name: str, scales: str | float | None, backend: str, checkpoint: str, rank: int, size: int
) -> ModelStorage:
    dtype = find_dtype(name)
    if scales is None and not dtype.dynamic:
        scales = checkpoint
    config = ServingConfig.parse(
        scales=scales, dtype=dtype.format, backend=backend, tp_rank=rank, tp_size=size
    )
    if config.options.dynamic_scales != dtype.dynamic:
        other = name.removesuffix("_static") if not dtype.dynamic else f"{name}_static"
        kind = "a scale for each token and head" if dtype.dynamic else "static scales"
        raise ConfigError(
            f"--kv-cache-dtype {name}: expected {kind}, got {config.options.scales!r}; use "
            f"{other} for these scales"
        )
    return ModelStorage(config, dtype)
