"""Helpers that are independent of the cache."""
