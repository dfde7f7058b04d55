"""Options for reading scales: they select the scales of a rank, and check the layers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ..errors import ScaleError
from ..utils.text import format_list
from .checkpoint.configs import find_cached_layers
from .layer_scales import LayerScales, ScaleData, check_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading scales, which are arguments of `KVScales.from_file`."""

    tp_rank: int = 0
    tp_size: int = 1
    strict: bool = True

    def __post_init__(self) -> None:
        check_ranks(self.tp_rank, self.tp_size)

    def merge_ranks(
        self, origin: object, num_ranks: int, read_rank: Callable[[int], ScaleData]
    ) -> ScaleData:
        """Return the scales of the requested rank, or the largest scales over all ranks.

        The file has `num_ranks` ranks. The scales of a single rank apply to each part of the model.
        """
        if self.tp_size == num_ranks:
            return read_rank(self.tp_rank)
        if self.tp_size > 1 and num_ranks > 1 and self.strict:
            raise ScaleError(
                f"{origin}: expected the scales of {self.tp_size} ranks, got {num_ranks}. Pass "
                "strict=False (--lenient) to use the largest scales of all ranks"
            )
        rank_scales = [read_rank(rank) for rank in range(num_ranks)]
        layers = dict(rank_scales[0].layers)
        ranks_differ = False
        for index, layer_scales in layers.items() if num_ranks > 1 else ():
            rank_kv = [
                scales.layers[index].static for scales in rank_scales if index in scales.layers
            ]
            if len(rank_kv) < num_ranks or any(scale.ndim for kv in rank_kv for scale in kv):
                raise ScaleError(
                    f"{origin}: expected one number for K and for V of layer {index} from every "
                    f"rank, got scales of {len(rank_kv)} of {num_ranks} ranks, which may be of "
                    "heads. Read one rank with tp_rank and tp_size"
                )
            ranks_differ = ranks_differ or any(kv != rank_kv[0] for kv in rank_kv)
            k, v = (torch.stack(side).max() for side in zip(*rank_kv, strict=True))
            layers[index] = replace(layer_scales, k=k, v=v)
        if ranks_differ:
            message = "%s: the scales of its %d ranks differ. The largest of each layer is used"
            logger.warning(message, origin, num_ranks)
        return replace(rank_scales[0], layers=layers)

    def select_layers(
        self,
        layers: Mapping[int, LayerScales],
        config: Mapping[str, object],
        origin: str,
        *,
        exact: bool = False,
    ) -> dict[int, LayerScales]:
        """Return the layers of the model. Layers past its end, as of a draft head, are left out.

        Without a config, all layers up to the last are expected. If `exact` and `strict`,
        additional layers are refused.
        """
        cache_layers = find_cached_layers(origin, config) if config else range(max(layers) + 1)
        expected = sorted(layers) if cache_layers is None else cache_layers
        extra_layers = format_list(index for index in layers if index not in expected)
        if extra_layers and exact and self.strict:
            raise ScaleError(
                f"{origin}: expected {len(expected)} layers, got further layers {extra_layers}. "
                "Use this model's scales, or pass strict=False (--lenient)"
            )
        last_layer = expected[-1] if expected else -1
        kept = {index: layer for index, layer in layers.items() if index <= last_layer}
        if later_layers := format_list(index for index in layers if index > last_layer):
            logger.info("%s: excluded the layers %s, past the last layer", origin, later_layers)
        missing = format_list(index for index in expected if index not in kept)
        if not kept or (missing and self.strict):
            raise ScaleError(
                f"{origin}: expected scales for {len(expected)} layers, got {len(kept)} without "
                f"layers {missing}. Use this model's scales, or pass strict=False (--lenient)"
            )
        if missing:
            logger.warning("%s: layers without scales: %s", origin, missing)
        return kept
