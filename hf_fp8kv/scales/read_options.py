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
        if num_ranks in (1, self.tp_size):
            return read_rank(self.tp_rank if num_ranks > 1 else 0)
        if self.tp_size > 1 and self.strict:
            raise ScaleError(
                f"{origin}: expected the scales of {self.tp_size} ranks, got {num_ranks}. Pass "
                "strict=False (--lenient) to use the largest scales of all ranks"
            )
        rank_scales = [read_rank(rank) for rank in range(num_ranks)]
        layers = dict(rank_scales[0].layers)
        ranks_differ = False
        for index, layer_scales in layers.items():
            rank_kv = [
                scales.layers[index].static for scales in rank_scales if index in scales.layers
            ]
            has_heads = any(scale.ndim for kv in rank_kv for scale in kv)
            if len(rank_kv) < num_ranks or has_heads:
                raise ScaleError(
                    f"{origin}: expected one number for K and for V of layer {index} from every "
                    f"rank, got scales of {len(rank_kv)} of {num_ranks} ranks, which may be of "
                    "heads. Read one rank with tp_rank and tp_size"
                )
            ranks_differ = ranks_differ or any(kv != rank_kv[0] for kv in rank_kv)
            k, v = (torch.stack(side).max() for side in zip(*rank_kv, strict=True))
            layers[index] = replace(layer_scales, k=k, v=v)
        if ranks_differ:
            logger.warning(
                "%s: the scales of its %d ranks differ. The largest of each layer is used",
                origin,
                num_ranks,
            )
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
        cached_indices = find_cached_layers(origin, config) if config else range(max(layers) + 1)
        expected_indices = sorted(layers) if cached_indices is None else cached_indices
        extra_layers = format_list(index for index in layers if index not in expected_indices)
        if extra_layers and exact and self.strict:
            raise ScaleError(
                f"{origin}: expected {len(expected_indices)} layers, got further layers "
                f"{extra_layers}. Use this model's scales, or pass strict=False (--lenient)"
            )
        last_index = expected_indices[-1] if expected_indices else -1
        kept_layers = {index: layer for index, layer in layers.items() if index <= last_index}
        missing_layers = format_list(
            index for index in expected_indices if index not in kept_layers
        )
        if not kept_layers or (missing_layers and self.strict):
            raise ScaleError(
                f"{origin}: expected scales for {len(expected_indices)} layers, got "
                f"{len(kept_layers)} without layers {missing_layers}. Use this model's scales, or "
                "pass strict=False (--lenient)"
            )
        if missing_layers:
            logger.warning("%s: layers without scales: %s", origin, missing_layers)
        return kept_layers
