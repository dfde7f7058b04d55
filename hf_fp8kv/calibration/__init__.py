"""Calibrate static scales on texts, choose storage plans, and measure their quality."""

from .plan_choice import choose_plan
from .quality import measure
from .static_scales import calibrate

__all__ = ["calibrate", "choose_plan", "measure"]
