"""How each layer is stored, from what vLLM was started with; checked before anything is served.

"scales" or a "plan" are named in vLLM's own configuration, which reaches every process of every
machine, as environment variables do not:

    --additional-config '{"hf_fp8kv": {"plan": "path/or/hub-id"}}'
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError, ScaleError
from ..modeling.tensor_parallel import TensorParallel
from ..scales.kv_scales import KVScales, resolve
from ..serving.config import LayerStorage, ServingConfig
from .dtypes import CacheDType, find_dtype

_KEY = "hf_fp8kv"
_OPTIONS = ("scales", "plan", "backend")


@dataclass(frozen=True)
class ModelStorage:
    """How the layers of a model are stored, in one tensor-parallel rank."""

    config: ServingConfig
    dtype: CacheDType

    @property
    def backend(self) -> str:
        """What a user said of the backend of the operations."""
        return self.config.options.backend

    def check_layers(self, indices: Iterable[int], count: int, model_types: Sequence[str]) -> None:
        """Raise ScaleError for scales that cannot be those of a model.

        Args:
            indices: the layers that are here.
            count: the model's layers.
            model_types: as transformers names the model, and what it has for text.
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
        if scales.model_type is not None and model_types and scales.model_type not in model_types:
            raise ScaleError(
                f"scales ({scales.origin}): expected scales of a {model_types[0]!r} model, got "
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
                f"bytes, got {plan} for layer {index}; calibrate without 'model', or keep whole "
                "layers out with vLLM's --kv-cache-dtype-skip-layers"
            )
        scales = options.layer_scales(index, heads, dim, dim)
        return LayerStorage(plan, *(None if x is None else x.to(device) for x in scales))


def read_storage(
    dtype: str, additional_config: object, checkpoint: str, rank: int, size: int,
    revision: str | None = None, engine: str = "",
) -> ModelStorage:  # fmt: skip
    """Return how a model is stored.

    Args:
        dtype: of `--kv-cache-dtype`.
        additional_config: vLLM's own, a dict.
        checkpoint: where the model is: static scales are looked for there if none are named.
        rank: of this process among the tensor-parallel ones.
        size: how many these are.
        revision: of the checkpoint, if it is a repository.
        engine: a name of its own for each engine; files are read once for one.

    Raises:
        ConfigError, ScaleError: something that cannot be, or not together.
    """
    given = additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping) or set(given) - set(_OPTIONS):
        raise ConfigError(
            f"--additional-config {_KEY}: expected a dict of {', '.join(_OPTIONS)}, got "
            f"{given!r}; leave the rest out"
        )
    scales, plan, backend = given.get("scales"), given.get("plan"), given.get("backend", "auto")
    for option, value, kinds, expected in (
        ("scales", scales, str | float | int | None, "a path, a repository id or a number"),
        ("plan", plan, str | None, "a path, a repository id or text"),
        ("backend", backend, str, "a name"),
    ):
        if not isinstance(value, kinds):
            raise ConfigError(
                f"--additional-config {_KEY}: {option}: expected {expected}, got {value!r}; leave "
                "it out, or name one"
            )
    return _read(dtype, scales, plan, backend, checkpoint, rank, size, revision, engine)


@functools.lru_cache(maxsize=8, typed=True)
def _read(
    name: str, given: str | float | None, plan: str | None, backend: str, checkpoint: str,
    rank: int, size: int, revision: str | None, engine: str,
) -> ModelStorage:  # fmt: skip
    dtype = find_dtype(name)
    scales: KVScales | str | float | None = given
    if given is plan is None and not dtype.dynamic:
        scales = resolve(checkpoint, tp_rank=rank, tp_size=size, revision=revision)
    ranks = TensorParallel(rank, size)
    config = ServingConfig.parse(
        scales=scales, plan=plan, dtype=dtype.format, backend=backend, tensor_parallel=ranks
    )
    if config.options.dynamic_scales != dtype.dynamic:
        other = name.removesuffix("_static") if not dtype.dynamic else f"{name}_static"
        kind = "a scale for each token and head" if dtype.dynamic else "static scales"
        raise ConfigError(
            f"--kv-cache-dtype {name}: expected {kind}, got {config.options.scales!r}; use "
            f"{other} for these scales"
        )
    return ModelStorage(config, dtype)
