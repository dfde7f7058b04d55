"""Observe K and V after RoPE, exactly as a model's cache would store them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ..cache.cache import FP8PagedCache
from ..errors import ConfigError, FP8KVError
from ..formats.rotation import rotate
from ..modeling.exact_states import exact_states, warn_of_rounding
from ..modeling.model_support import with_cache
from ..modeling.tensor_parallel import tensor_parallel
from .divergence import make_last_logit_kwargs

# Exceptions that a model's code may raise if it is called in an unexpected way.
MODEL_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)


class _ObservedCache(DynamicCache):
    """A `DynamicCache` that also passes the index, K and V of each layer to a function."""

    def __init__(self, config: Any, observe_layer: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__(config=config)
        self._observe_layer = observe_layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._observe_layer(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _list_vectors(states: Tensor, is_token: Tensor | None) -> Tensor:
    """Return the vectors of all tokens in states `[B, H, T, D]`, `[N, H, D]`, without padding."""
    # Sums are in float64, which MPS does not support.
    states = states.cpu() if states.device.type == "mps" else states
    rows = states.detach().transpose(1, 2)
    return rows.flatten(0, 1) if is_token is None else rows[is_token.to(rows.device)]


def make_nonfinite_error(layer_index: int, side_name: str) -> ConfigError:
    """Return the error for NaN or infinity in a layer. `side_name` is "K", "V" or "K and V"."""
    return ConfigError(
        f"layer {layer_index}: expected finite {side_name}, got NaN or infinity. Load the model in "
        "bfloat16 or float32, and check the text"
    )


def find_paged_layers(model: PreTrainedModel) -> frozenset[int]:
    """Return the indices of the layers that a cache stores in 8 bits.

    Raise ConfigError if the model has no such layers, does not read text, or lacks heads.
    """
    num_ranks = tensor_parallel(model).size
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"model: expected a model that reads text, got {type(model).__name__}, which reads "
            f"{model.main_input_name}. Use dtype='fp8_e3m4', which needs no run of the model"
        )
    if num_ranks > 1:
        raise ConfigError(
            f"model: expected a model with all heads, got one of {num_ranks} tensor-parallel "
            "ranks. Load it in one process (device_map='auto' spreads its layers), and use the "
            "scales with any number of processes"
        )
    warn_of_rounding(model)
    # A constant scale avoids the message about scales that the checkpoint declares.
    layers = FP8PagedCache(model.config, scales=1.0, backend="torch").paged_layers
    if not layers:
        raise ConfigError(
            f"model: expected a model with attention layers that can be stored in 8 bits, got "
            f"{type(model).__name__} without any"
        )
    return frozenset(layer.index for layer in layers)


def observe(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    layer_indices: frozenset[int],
    on_states: Callable[[int, Tensor, Tensor], None],
    first_position: int | None = None,
) -> None:
    """Run a model in eval mode once, on an empty cache, and call `on_states` for each layer.

    `on_states` receives the index of a layer, and K and V `[N, Hkv, D]`, in the model's dtype, on
    the layer's device.

    Both parts of an encoder-decoder read the windows, right-padded to the longest. Only its
    decoder's self-attention is observed. `first_position` is the position of the first tokens, for
    models that take `position_ids`. None means the default of the model. Raise ConfigError if the
    model cannot read token ids into a cache.
    """
    device = find_input_device(model)
    ids = pad_sequence([window.long() for window in windows], batch_first=True).to(device)
    is_token: Tensor | None = None
    inputs: dict[str, Any] = {"input_ids": ids}
    if len({*map(len, windows)}) > 1:
        lengths = torch.tensor([*map(len, windows)], device=device)
        is_token = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        inputs["attention_mask"] = is_token.long()

    def observe_layer(index: int, key: Tensor, value: Tensor) -> None:
        if index in layer_indices:
            on_states(index, _list_vectors(key, is_token), _list_vectors(value, is_token))

    cache: Any = _ObservedCache(model.config, observe_layer)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
        inputs |= {f"decoder_{name}": value for name, value in inputs.items()}
    if first_position is not None:
        positions = torch.arange(ids.shape[1], device=device) + first_position
        inputs["position_ids"] = positions.expand(ids.shape)
    try:
        with torch.no_grad(), exact_states():
            model(**inputs, **with_cache(model, cache), **make_last_logit_kwargs(model))
    except FP8KVError:
        raise
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"model: expected a model that reads token ids into a cache, got "
            f"{type(model).__name__}: {type(error).__name__}: {error}. Use dynamic scales, which "
            "need no calibration"
        ) from error


def find_input_device(model: PreTrainedModel) -> torch.device:
    """Return the device for token ids. A spread or offloaded model moves them with hooks."""
    return next(
        (parameter.device for parameter in model.parameters() if not parameter.is_meta),
        torch.device("cpu"),
    )


def center_and_rotate(states: Tensor, center: Tensor | None, *, rotated: bool) -> Tensor:
    """Return K or V, `[N, Hkv, D]`, in float32, minus a center `[Hkv, D]`, and then rotated."""
    states = states.float() if center is None else states.float() - center.to(states.device)
    return rotate(states) if rotated else states
