"""Utilities: helpers that are independent of the cache."""
