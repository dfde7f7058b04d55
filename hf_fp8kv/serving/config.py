"""The configuration of a model's engine, checked before any engine is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..cache.options import CacheOptions
from ..formats import LayerPlan
from ..modeling.identity import identify_model
from ..prefix.store import PrefixStore
from ..prefix.stored_pages import digest_options


class LayerStorage(NamedTuple):
    """The storage of one layer. Scales and center are float32, on the device of the pages."""

    plan: LayerPlan
    k_scale: torch.Tensor | None  # static scales of K, [Hkv, D]. None if dynamic or unquantized
    v_scale: torch.Tensor | None  # as `k_scale`, for V
    center: torch.Tensor | None  # vector that is subtracted from each K, [Hkv, D]


@dataclass(frozen=True)
class ServingConfig:
    """The parsed keywords of `enable`."""

    options: CacheOptions  # except the page size, for which the engine has a separate setting
    prefix_store: PrefixStore | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of `parse`

    @classmethod
    def parse(cls, *, prefix_store: PrefixStore | None = None, **keywords: Any) -> "ServingConfig":
        """Return the configuration for the keywords of `enable` and for `tensor_parallel`.

        Raises:
            ConfigError, ScaleError, BackendError: A keyword is invalid, as in `enable`.
        """
        return cls(CacheOptions.parse(prefill="stored", **keywords), prefix_store, keywords)

    def identify(self, model: Any, page_size: int) -> str:
        """Return a digest of everything that stored pages depend on, except the tokens."""
        num_layers = model.config.get_text_config().num_hidden_layers
        layers = ((index, None, self.options.get_layer_plan(index)) for index in range(num_layers))
        return identify_model(model) + digest_options(
            replace(self.options, page_size=page_size), layers
        )


def make_layer_storage(
    options: CacheOptions, index: int, num_heads: int, head_dim: int, device: torch.device | str
) -> LayerStorage:
    """Return the storage of one layer, for the `num_heads` KV heads of this process.

    Raises:
        ConfigError, ScaleError: The plan or the scales lack the layer, or do not fit it.
    """
    tensors = (
        None if tensor is None else tensor.to(device)
        for tensor in options.get_layer_scales(index, num_heads, head_dim, head_dim)
    )
    return LayerStorage(options.get_layer_plan(index), *tensors)
