"""Caches that hold the same text, from one call of the model.

With `prefill="exact"` the first call attends to its own unquantised keys and values, so what it
hands to a cache does not depend on the cache. One call with an unquantised cache therefore serves
all of them: its keys and values are given to each cache's `update`, layer by layer, in one piece,
as the call itself would have. What a cache then stores is bit for bit what it would have stored.
"""

from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_fp8kv.calibration.divergence import compute_logits
from hf_fp8kv.errors import ConfigError

from .caches import Row


class Prefix:
    """The beginning of a text, to fill caches with.

    Args:
        model: a decoder.
        ids: `[1, N]`, int64, on the model's device.

    Raises:
        ConfigError: the model is an encoder-decoder.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        if model.config.is_encoder_decoder:
            raise ConfigError(
                f"model: expected a decoder, got {type(model).__name__}, whose text is read by an "
                "encoder; use `hf-fp8kv bench quality`"
            )
        self._model, self._ids = model, ids

    @cached_property
    def _layers(self) -> list[Any] | None:
        """What one call gives to every layer, or None where there are layers of other kinds."""
        # Without the config: layers with a window keep what has left it, too.
        recorded = DynamicCache()
        compute_logits(self._model, self._ids, recorded, {}, scored=False)
        layers: list[Any] = recorded.layers
        return layers if all(type(layer) is DynamicLayer for layer in layers) else None

    def fill(self, row: Row, length: int) -> Any:
        """Return a new cache of a row that holds the first `length` tokens."""
        cache = row.make(self._model)
        if self._layers is None:
            compute_logits(self._model, self._ids[:, :length], cache, {}, scored=False)
            return cache
        for index, layer in enumerate(self._layers):
            keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
            cache.update(keys, values, index)
        return cache
