"""Predictions and tasks of whole models at long context, under this package's caches and others."""

from .chart import plot
from .report import format_table
from .suite import THOROUGH, run_long_suite

__all__ = ["THOROUGH", "format_table", "plot", "run_long_suite"]
