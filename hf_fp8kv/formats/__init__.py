"""Formats: what one stored byte means."""

from .formats import AUTO, FORMATS, MIN_SCALE, Format, parse_dtype

__all__ = ["AUTO", "FORMATS", "MIN_SCALE", "Format", "parse_dtype"]
