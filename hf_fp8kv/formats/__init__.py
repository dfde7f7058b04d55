"""Formats: what one stored byte means."""

from .formats import (
    ALIASES,
    AUTO,
    DEFAULT_DTYPE,
    DISTINCT,
    FORMATS,
    MIN_SCALE,
    STATIC_DTYPE,
    Format,
    parse_dtype,
)
from .plan import LayerPlan, SidePlan

__all__ = [
    "ALIASES",
    "AUTO",
    "DEFAULT_DTYPE",
    "DISTINCT",
    "FORMATS",
    "MIN_SCALE",
    "STATIC_DTYPE",
    "Format",
    "LayerPlan",
    "SidePlan",
    "parse_dtype",
]
