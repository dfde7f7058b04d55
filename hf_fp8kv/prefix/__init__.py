"""Reuse of prefixes from a cache, or from a store in a folder."""
