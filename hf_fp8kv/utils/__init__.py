"""Utilities that know nothing of a cache."""
