"""Read the storage of each layer from vLLM's options, and check the options before serving.

Scales or a plan are set in vLLM's configuration, because unlike environment variables it reaches
every process on every machine:

    --additional-config '{"hf_fp8kv": {"plan": "path/or/hub-id"}}'
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError, ScaleError
from ..modeling.tensor_parallel import TensorParallel
from ..scales.kv_scales import KVScales, resolve_scales
from ..serving.config import LayerStorage, ServingConfig
from .dtypes import CacheDType, find_dtype

_KEY = "hf_fp8kv"
_OPTIONS = ("scales", "plan", "backend")


@dataclass(frozen=True)
class ModelStorage:
    """The storage of a model's layers in one tensor-parallel rank."""

    config: ServingConfig
    dtype: CacheDType

    @property
    def backend(self) -> str:
        """The backend that the user chose."""
        return self.config.options.backend

    def check_layers(
        self, indices: Iterable[int], num_layers: int, model_types: Sequence[str]
    ) -> None:
        """Raise ScaleError for scales that do not belong to the model.

        Args:
            indices: Layers of this process.
            num_layers: Number of layers of the model.
            model_types: transformers' model types of the model and of its text part.
        """
        scales = self.config.options.scales
        self.config.options.check_layers(list(indices), num_layers)
        if not isinstance(scales, KVScales):
            return
        if extra_layers := [index for index in scales.layers if index >= num_layers]:
            raise ScaleError(
                f"scales ({scales.origin}): expected only the model's layers, 0 to "
                f"{num_layers - 1}, also got {extra_layers}. Use the scales of the served model"
            )
        if scales.model_type is not None and model_types and scales.model_type not in model_types:
            raise ScaleError(
                f"scales ({scales.origin}): expected scales of a {model_types[0]!r} model, got "
                f"{scales.model_type!r}. Use the scales of the served model"
            )

    def layer_storage(self, index: int, heads: int, dim: int, device: torch.device) -> LayerStorage:
        """Return the storage of a layer, with the KV heads of this rank.

        Raises:
            ScaleError: The scales have different heads, head sizes or layers.
            ConfigError: The plan keeps K or V in 16 bits.
        """
        options = self.config.options
        plan = options.layer_plan(index)
        if any(side.is_auto for side in plan):
            raise ConfigError(
                f"plan: expected 8 bits for K and V, because {self.dtype.name} fixes the size of "
                f"all tokens, got {plan} for layer {index}. Calibrate without 'model', or "
                "exclude whole layers with vLLM's --kv-cache-dtype-skip-layers"
            )
        scales = options.layer_scales(index, heads, dim, dim)
        return LayerStorage(plan, *(None if x is None else x.to(device) for x in scales))


def read_storage(
    dtype: str, additional_config: object, checkpoint: str, rank: int, size: int,
    revision: str | None = None, engine: str = "",
) -> ModelStorage:  # fmt: skip
    """Return the storage of a model.

    Args:
        dtype: Value of `--kv-cache-dtype`.
        additional_config: vLLM's `--additional-config`, a dict.
        checkpoint: Folder or repository of the model. It has the static scales if none are given.
        rank, size: Rank of this process, and number of processes, in tensor parallelism.
        revision: Revision of the checkpoint, if it is a repository.
        engine: Unique name of the engine. Files are read once per engine.

    Raises:
        ConfigError, ScaleError: An option is invalid, or conflicts with another option.
    """
    config = additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(config, Mapping) or set(config) - set(_OPTIONS):
        raise ConfigError(
            f"--additional-config {_KEY}: expected a dict of {', '.join(_OPTIONS)}, got "
            f"{config!r}. Omit other entries"
        )
    scales, plan, backend = config.get("scales"), config.get("plan"), config.get("backend", "auto")
    for option, value, types, expected in (
        ("scales", scales, str | float | int | None, "a path, a repository id or a number"),
        ("plan", plan, str | None, "a path, a repository id or text"),
        ("backend", backend, str, "a name"),
    ):
        if not isinstance(value, types):
            raise ConfigError(
                f"--additional-config {_KEY}: {option}: expected {expected}, got {value!r}. Omit "
                f"{option}, or pass such a value"
            )
    return _load_storage(dtype, scales, plan, backend, checkpoint, rank, size, revision, engine)


@functools.lru_cache(maxsize=8, typed=True)
def _load_storage(
    name: str, scales: str | float | None, plan: str | None, backend: str, checkpoint: str,
    rank: int, size: int, revision: str | None, engine: str,
) -> ModelStorage:  # fmt: skip
    dtype = find_dtype(name)
    loaded_scales: KVScales | str | float | None = scales
    if scales is None and plan is None and not dtype.dynamic:
        loaded_scales = resolve_scales(checkpoint, tp_rank=rank, tp_size=size, revision=revision)
    ranks = TensorParallel(rank, size)
    config = ServingConfig.parse(
        scales=loaded_scales, plan=plan, dtype=dtype.format, backend=backend, tensor_parallel=ranks
    )
    if config.options.dynamic_scales != dtype.dynamic:
        matching_name = f"{name}_static" if dtype.dynamic else name.removesuffix("_static")
        kind = "a scale for each token and head" if dtype.dynamic else "static scales"
        raise ConfigError(
            f"--kv-cache-dtype {name}: expected {kind}, got {config.options.scales!r}. Use "
            f"{matching_name} for these scales"
        )
    return ModelStorage(config, dtype)
