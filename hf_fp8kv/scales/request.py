"""Request: what a caller wants of a file of scales, and whether what was read is that."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ScaleError
from ..utils.text import format_list
from .checkpoint.config import layers_with_cache
from .layer_scales import LayerScales
from .validation import check_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What the caller wants of a file; the arguments of `KVScales.from_file`."""

    tp_rank: int = 0
    tp_size: int = 1
    strict: bool = True
    num_layers: int | None = None
    model_type: str | None = None

    def __post_init__(self) -> None:
        check_ranks(self.tp_rank, self.tp_size)
        if self.num_layers is not None and self.num_layers < 1:
            raise ScaleError(
                f"num_layers: expected at least 1, got {self.num_layers}; None takes what is there"
            )

    def choose_ranks(self, origin: object, count: int) -> Sequence[int]:
        """Return which of `count` ranks to read: the caller's, or all for the largest scale.

        The scales of one rank are those of the whole model: they hold for each part of it.
        """
        if self.tp_size == count:
            return [self.tp_rank]
        if self.tp_size > 1 and count > 1 and self.strict:
            raise ScaleError(
                f"{origin}: expected the scales of {self.tp_size} ranks, got {count}; pass "
                "strict=False (--lenient) to use the largest of all ranks"
            )
        return range(count)

    def expect_layers(self, layers: Collection[int], config: Mapping[str, object]) -> Sequence[int]:
        """Return the layers that should have scales; without a config, all up to the last one."""
        if self.num_layers is not None:
            return range(self.num_layers)
        if not config:
            return range(max(layers) + 1)
        owners = layers_with_cache(config)
        return sorted(layers) if owners is None else owners

    def select_layers(
        self, layers: dict[int, LayerScales], expected: Sequence[int], origin: str
    ) -> dict[int, LayerScales]:
        """Return the layers that the model has, without those past its end, as of a draft head."""
        last = expected[-1] if expected else -1
        extra = [index for index in layers if index > last]
        if extra:
            logger.info("%s: left out the layers %s, past the last one", origin, format_list(extra))
        kept = {index: layer for index, layer in layers.items() if index <= last}
        missing = format_list(index for index in expected if index not in kept)
        if not kept or (missing and self.strict):
            raise ScaleError(
                f"{origin}: expected scales for {len(expected)} layers, got {len(kept)}: missing "
                f"{missing}; use this model's scales, or pass strict=False (--lenient)"
            )
        if missing:
            logger.warning("%s: layers without scales: %s", origin, missing)
        return kept

    def check_model_type(self, origin: object, model_type: str | None, expected: object) -> None:
        """Raise ScaleError for scales of another model; without `strict`, log it."""
        if model_type is None or expected is None or model_type == expected:
            return
        message = f"{origin}: expected scales of a {expected!r} model, got {model_type!r}"
        if self.strict:
            raise ScaleError(
                f"{message}; use this model's scales, or pass strict=False (--lenient)"
            )
        logger.warning("%s", message)


def warn_of_differences(origin: object, scales: Sequence[object], ranks: int) -> None:
    """Log it if the scales of several ranks are not the same."""
    if any(other != scales[0] for other in scales):
        logger.warning(
            "%s: the scales of its %d ranks differ: the largest one is used of each layer",
            origin,
            ranks,
        )
