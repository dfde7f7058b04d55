"""Static scales from texts: what is observed, what is chosen, and how good it is."""

from .run import calibrate, measure

__all__ = ["calibrate", "measure"]
