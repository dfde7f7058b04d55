"""Cache: all that knows transformers' cache classes."""
