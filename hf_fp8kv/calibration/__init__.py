"""Static scales from texts, storage plans, and how good they are."""

from .plan_choice import choose_plan
from .run import calibrate, measure

__all__ = ["calibrate", "choose_plan", "measure"]
