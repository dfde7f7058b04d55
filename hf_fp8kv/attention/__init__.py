"""The attention implementation "fp8_paged", its masks, and its installation in models."""
