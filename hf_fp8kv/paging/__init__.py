"""Paging: the pages of each token, and their bytes. Independent of transformers."""
