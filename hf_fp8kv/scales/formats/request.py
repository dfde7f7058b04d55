"""What a caller wants of a file of scales, and whether what was read is that."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...errors import ScaleError
from ...utils.text import format_list
from ..layer_scales import LayerScales
from ..validation import check_ranks
from .config import attention_layers

__all__ = ["Request", "check_model_type", "complete", "expected_layers", "ranks_to_take"]

logger = logging.getLogger(__package__)


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


def ranks_to_take(origin: object, count: int, want: Request) -> Sequence[int]:
    """Which of the ranks a caller takes: its own, or all of them for the largest scale.

    The scales of one rank are those of the whole model: they hold for each part of it.
    """
    if want.tp_size == count:
        return [want.tp_rank]
    if want.tp_size > 1 and count > 1 and want.strict:
        raise ScaleError(
            f"{origin}: expected the scales of {want.tp_size} ranks, got {count}; pass "
            "strict=False to use the largest of all ranks"
        )
    return range(count)


def expected_layers(
    found: Collection[int], config: Mapping[str, object], want: Request
) -> Sequence[int]:
    """The layers that should have scales; without a config, all up to the last one found."""
    if want.num_layers is not None:
        return range(want.num_layers)
    if not config:
        return range(max(found) + 1)
    owned = attention_layers(config)
    return sorted(found) if owned is None else owned


def complete(
    layers: dict[int, LayerScales], expected: Sequence[int], want: Request, origin: str
) -> dict[int, LayerScales]:
    """The layers that the model has; those that it lacks are dropped, such as of a draft head."""
    last = expected[-1] if expected else -1
    extra = [index for index in layers if index > last]
    if extra:
        logger.info("%s: left out the layers %s, past the last one", origin, format_list(extra))
    kept = {index: layer for index, layer in layers.items() if index <= last}
    missing = format_list(index for index in expected if index not in kept)
    if not kept or (missing and want.strict):
        raise ScaleError(
            f"{origin}: expected scales for {len(expected)} layers, got {len(kept)}: missing "
            f"{missing}; use the scales of this very model, or pass strict=False to use those "
            "that are there"
        )
    if missing:
        logger.warning("%s: layers without scales: %s", origin, missing)
    return kept


def check_model_type(origin: object, found: str | None, wanted: object, want: Request) -> None:
    """Raises ScaleError for scales of another model, or says so in the log."""
    if found is None or wanted is None or found == wanted:
        return
    message = f"{origin}: expected scales of a {wanted!r} model, got {found!r}"
    if want.strict:
        raise ScaleError(f"{message}; use the scales of this very model, or pass strict=False")
    logger.warning("%s", message)
