"""The cache: everything that depends on transformers' cache classes."""
