"""Attention: the implementation "fp8_paged", its masks, and switching it on."""
