"""Kernel check: the Triton kernels compiled for every GPU, and what their machine code must be."""
