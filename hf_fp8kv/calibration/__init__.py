"""Calibrate static scales on texts, and choose storage plans."""

from .plan_choice import choose_plan
from .static_scales import calibrate

__all__ = ["calibrate", "choose_plan"]
