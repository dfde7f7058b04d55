"""Prefixes that are not computed again: held by a cache, or stored in a folder."""
