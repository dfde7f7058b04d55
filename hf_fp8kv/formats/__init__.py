"""Formats: what one stored byte means."""

from .formats import ALIASES, AUTO, DISTINCT, FORMATS, MIN_SCALE, Format, parse_dtype

__all__ = ["ALIASES", "AUTO", "DISTINCT", "FORMATS", "MIN_SCALE", "Format", "parse_dtype"]
