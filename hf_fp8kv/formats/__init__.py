"""Formats: what one stored byte means."""

from .formats import AUTO, DISTINCT, FORMATS, MIN_SCALE, Format, parse_dtype

__all__ = ["AUTO", "DISTINCT", "FORMATS", "MIN_SCALE", "Format", "parse_dtype"]
