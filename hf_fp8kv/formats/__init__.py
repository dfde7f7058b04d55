"""Formats: what one stored byte means."""

from .formats import (
    ADAPTIVE,
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
from .plan import LayerPlan, SidePlan, count_plans, summarize_plan

__all__ = [
    "ADAPTIVE",
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
    "count_plans",
    "parse_dtype",
    "summarize_plan",
]
