"""Paging: which page holds which token, and the bytes. Integers and bytes, no transformers."""
