"""Calibrate static scales on texts, choose storage plans, and measure their quality."""

from .plan_choice import choose_plan
from .run import calibrate, measure

__all__ = ["calibrate", "choose_plan", "measure"]
